"""Clients of the buffer service: `BufferClient` for producers here, `BlockingBufferClient` for learner ranks beside it.

Errors arrive as the classes that the server raised; a connection that breaks is an ActorLostError.
"""

import asyncio
import uuid
from collections.abc import Iterable, Iterator, Sequence

import grpc.aio

from headrace.engine.errors import DeadlineError
from headrace.engine.transport.buffer_put import PutSender, Rejected
from headrace.engine.transport.buffer_take import BlockingBufferClient, TakenBatch
from headrace.engine.transport.buffer_wire import CALL_TIMEOUT_S, BufferStats, stats_from_proto
from headrace.engine.transport.channel import FRAME_BYTES
from headrace.engine.transport.status import error_from_rpc
from headrace.engine.types.records import RecordHeader
from headrace.v1 import buffer_pb2 as pb
from headrace.v1 import buffer_pb2_grpc as rpc
from headrace.v1 import trajectory_pb2

__all__ = ["BlockingBufferClient", "BufferClient", "BufferStats", "Rejected", "TakenBatch"]


class BufferClient:
    """Puts records and columns; for one event loop. Use it with `contextlib.aclosing`, or call `aclose`.

    Args:
        channel: Owned by the caller.
        producer: A name for people to read; each client adds something unique to it.
        frame_bytes: Records are gathered into frames of about this size, larger ones are cut.
        reconnect_s: How long a broken connection is tried again before the waiting puts fail.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        producer: str = "producer",
        *,
        frame_bytes: int = FRAME_BYTES,
        reconnect_s: float = 60.0,
    ) -> None:
        self._channel = channel
        self._stub = rpc.BufferServiceStub(channel)
        self._producer_id = f"{producer}-{uuid.uuid4().hex[:12]}"
        self._frame_bytes = frame_bytes
        self._reconnect_s = reconnect_s
        self._senders: dict[str, PutSender] = {}

    async def put(
        self, table: str, records: Sequence[tuple[RecordHeader, bytes]], *, deadline_s: float | None = None
    ) -> tuple[Rejected, ...]:
        """Put records; returns when the table has each of them or has rejected it. Several puts may run side by side.

        Waits while the table is full. A broken stream is opened again and what was not acknowledged is sent again;
        the table stores each record once all the same. Cancelling withdraws what was not sent; records that were sent
        may be stored.

        Args:
            table: The table.
            records: Headers and encoded records.
            deadline_s: Seconds until it is given up; None waits for as long as the server lives.

        Returns:
            The records that were rejected, with reasons; empty when all are stored.

        Raises:
            DeadlineError: Not all were stored in time (the table is full, or the server does not answer).
            ActorLostError: The server was not reachable for `reconnect_s` seconds.
            SchemaError: There is no such table.
        """
        sender = self._senders.get(table)
        if sender is None:
            sender = self._senders[table] = PutSender(
                self._channel,
                table,
                self._producer_id,
                frame_bytes=self._frame_bytes,
                reconnect_s=self._reconnect_s,
            )
        scope = asyncio.timeout(deadline_s)
        try:
            async with scope:
                return await sender.put(records)
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineError(
                f"{len(records)} records were not accepted by table {table!r} within {deadline_s} s "
                f"({sender.unacked_bytes} bytes are under way): the table is full or its server does not answer"
            ) from None

    async def put_columns(
        self, table: str, columns: Iterable[tuple[str, str, bytes]], *, timeout_s: float = CALL_TIMEOUT_S
    ) -> tuple[Rejected, ...]:
        """Add columns, each (record id, name, encoded column); returns those that were rejected. May be repeated.

        Raises:
            SchemaError: There is no such table.
            ActorLostError: The connection broke.
        """
        rejected: list[Rejected] = []
        for request in _column_requests(table, columns, self._frame_bytes):
            try:
                answer = await self._stub.PutColumns(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error, f"putting columns into table {table!r}") from error
            rejected.extend(Rejected(record_id=one.record_id, reason=one.reason) for one in answer.rejected)
        return tuple(rejected)

    async def stats(self, table: str, *, timeout_s: float = CALL_TIMEOUT_S) -> BufferStats:
        """A table's statistics.

        Raises:
            SchemaError: There is no such table.
            ActorLostError: The connection broke.
        """
        try:
            answer = await self._stub.GetStats(pb.GetStatsRequest(table=table), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"asking for statistics of table {table!r}") from error
        return stats_from_proto(answer)

    async def aclose(self) -> None:
        """End the streams; puts that still wait fail with ActorLostError. The channel stays open. Harmless twice."""
        for sender in self._senders.values():
            await sender.close()


def _column_requests(
    table: str, columns: Iterable[tuple[str, str, bytes]], frame_bytes: int
) -> Iterator[pb.PutColumnsRequest]:
    """Columns in requests of about one frame."""
    request, num_bytes = pb.PutColumnsRequest(table=table), 0
    for record_id, name, data in columns:
        request.columns.append(trajectory_pb2.EncodedColumn(record_id=record_id, name=name, data=data))
        num_bytes += len(data)
        if num_bytes >= frame_bytes:
            yield request
            request, num_bytes = pb.PutColumnsRequest(table=table), 0
    if request.columns:
        yield request
