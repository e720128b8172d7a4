"""The servicer of `headrace.v1.BufferService` over any `BufferBackend`."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, cast

import grpc.aio

from headrace.buffers.backend import BufferBackend, LeasedBatch, TakeOrder
from headrace.buffers.put_stream import Producers, PutStream
from headrace.engine.errors import HeadraceError
from headrace.engine.transport.buffer_wire import MAX_RECORD_BYTES, cut_frames, micro_batch_to_proto
from headrace.engine.transport.channel import FRAME_BYTES
from headrace.engine.transport.convert import version_to_proto
from headrace.engine.transport.server import Service
from headrace.v1 import buffer_pb2 as pb
from headrace.v1 import buffer_pb2_grpc as rpc
from headrace.v1 import trajectory_pb2

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

WINDOW_BYTES = 8 << 20
_LEAST_WINDOW_BYTES = FRAME_BYTES
_ALL_WINDOWS_BYTES = 64 << 20
# An answer must leave before the caller gives up, so that it hears what is missing and not only that time is up.
_ANSWER_SHARE, _ANSWER_MAX_S = 0.1, 0.5


def buffer_service(
    backend: BufferBackend, *, window_bytes: int = WINDOW_BYTES, max_record_bytes: int = MAX_RECORD_BYTES
) -> Service:
    """What a `GrpcServer` needs to serve a backend.

    Args:
        backend: Owned by the caller.
        window_bytes: What one producer may send beyond what is acknowledged. All windows together are kept below
            64 MiB, so each gets less when there are many producers, but never less than one frame.
        max_record_bytes: Larger records are rejected at their first piece.
    """
    servicer = BufferServicer(backend, window_bytes=window_bytes, max_record_bytes=max_record_bytes)
    return Service(
        name="headrace.v1.BufferService",
        add=lambda server: rpc.add_BufferServiceServicer_to_server(servicer, server),
    )


class BufferServicer(rpc.BufferServiceServicer):
    """Serves a backend; see `buffer_service` for the arguments."""

    def __init__(self, backend: BufferBackend, *, window_bytes: int, max_record_bytes: int) -> None:
        self._backend = backend
        self._window_bytes = window_bytes
        self._max_record_bytes = max_record_bytes
        self._producers = Producers()
        self._num_streams = 0

    async def Put(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[pb.PutRequest], context: "Context"
    ) -> AsyncIterator[pb.PutResponse]:
        self._num_streams += 1
        share = max(_LEAST_WINDOW_BYTES, _ALL_WINDOWS_BYTES // self._num_streams)
        stream = PutStream(
            self._backend,
            self._producers,
            window_bytes=min(self._window_bytes, share),
            max_record_bytes=self._max_record_bytes,
        )
        reading = asyncio.create_task(_read(stream, request_iterator))
        try:
            while (answer := await stream.answer()) is not None:
                yield answer
        finally:
            self._num_streams -= 1
            reading.cancel()
            await asyncio.wait({reading})
            await stream.close()

    async def PutColumns(self, request: pb.PutColumnsRequest, context: "Context") -> pb.PutColumnsResponse:
        self._backend.stats(request.table)  # refuses an unknown table
        rejected: list[pb.RejectedRecord] = []
        for column in request.columns:
            try:
                verdict = self._backend.put_column(request.table, column.record_id, column.name, column.data)
                reason = "" if verdict.accepted else verdict.reason
            except HeadraceError as error:
                reason = str(error)
            if reason:
                rejected.append(pb.RejectedRecord(record_id=column.record_id, reason=reason))
        return pb.PutColumnsResponse(rejected=rejected)

    async def Take(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.TakeRequest, context: "Context"
    ) -> AsyncIterator[pb.TakeResponse]:
        batch = await self._backend.take(
            TakeOrder(
                table=request.table,
                step=request.step,
                consumer_id=request.consumer_id,
                incarnation=request.incarnation,
                rank=request.rank,
                num_ranks=request.num_ranks,
                deadline_s=_time_to_wait(context),
                sharing_hidden_size=request.sharing_hidden_size,
            )
        )
        yield pb.TakeResponse(batch=_batch_to_proto(batch, request.rank))
        for frame in _frames_of(batch, request.rank):
            yield frame

    async def Commit(self, request: pb.CommitRequest, context: "Context") -> pb.CommitResponse:
        version = await self._backend.commit(request.table, request.step, request.lease_token, request.skipped)
        return pb.CommitResponse(version=version_to_proto(version))

    async def Release(self, request: pb.ReleaseRequest, context: "Context") -> pb.ReleaseResponse:
        await self._backend.release(request.table, request.step, request.lease_token)
        return pb.ReleaseResponse()

    async def GetStats(self, request: pb.GetStatsRequest, context: "Context") -> pb.GetStatsResponse:
        stats = self._backend.stats(request.table)
        return pb.GetStatsResponse(
            num_records=stats.num_records,
            num_groups=stats.num_groups,
            num_bytes=stats.num_bytes,
            num_added=stats.num_added,
            num_evicted=stats.num_evicted,
            num_sampled=stats.num_sampled,
            num_leased=stats.num_leased,
        )


async def _read(stream: PutStream, requests: AsyncIterator[pb.PutRequest]) -> None:
    """Feed a stream until its producer or an error ends it; the error goes to whoever answers."""
    try:
        async for request in requests:
            await stream.feed(request)
    except Exception as error:  # handed on: `PutStream.answer` raises it
        stream.finish(error)
    else:
        stream.finish()


def _time_to_wait(context: "Context") -> float | None:
    left_s = cast("float | None", context.time_remaining())  # None without a deadline, whatever the stubs say
    if left_s is None:
        return None
    return max(0.0, left_s - min(_ANSWER_MAX_S, left_s * _ANSWER_SHARE))


def _batch_to_proto(batch: LeasedBatch, rank: int) -> pb.LeasedBatch:
    return pb.LeasedBatch(
        lease_token=batch.lease_token,
        step=batch.plan.step,
        micro_batches=[micro_batch_to_proto(micro_batch) for micro_batch in batch.plan.ranks[rank].micro_batches],
        num_loss_tokens=batch.plan.num_loss_tokens,
        num_sequences=batch.plan.num_sequences,
        num_groups=batch.plan.num_groups,
        mean_lag=batch.mean_lag,
        max_lag=batch.max_lag,
    )


def _frames_of(batch: LeasedBatch, rank: int) -> Iterator[pb.TakeResponse]:
    """A rank's records in the plan's order, each with its columns behind its last piece."""
    micro_batches = batch.plan.ranks[rank].micro_batches
    stored = [batch.records[record_id] for micro_batch in micro_batches for record_id in micro_batch.record_ids]
    for frame in cut_frames(((record.header, record.data) for record in stored), FRAME_BYTES):
        yield pb.TakeResponse(
            records=[piece.to_proto() for piece in frame],
            columns=[
                trajectory_pb2.EncodedColumn(record_id=piece.header.record_id, name=name, data=data)
                for piece in frame
                if piece.is_last
                for name, data in batch.records[piece.header.record_id].columns.items()
            ],
        )
