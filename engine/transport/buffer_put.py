"""A producer's end of a Put stream: frames in flight under credit, reconnects, and what is sent again.

Invariants:
    * A frame gets its sequence number when it is first sent; numbers have no gaps, and frames are sent in order.
    * A frame is kept until it is acknowledged; after a broken stream those that were not are sent again, oldest first.
    * Bytes under way stay within the server's credit, or are one frame.
    * Each put ends exactly once: acknowledged, failed or withdrawn.
"""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from headrace.engine.clock import SystemClock
from headrace.engine.errors import ActorLostError, HeadraceError
from headrace.engine.scheduling.retry import Deadline, RetryPolicy
from headrace.engine.transport.buffer_wire import Piece, cut_frames
from headrace.engine.transport.status import error_from_rpc
from headrace.engine.types.records import RecordHeader
from headrace.v1 import buffer_pb2 as pb
from headrace.v1 import buffer_pb2_grpc as rpc

if TYPE_CHECKING:
    Call = grpc.aio.StreamStreamCall[Any, Any]

_RECONNECT = RetryPolicy(retries=1_000_000, base_s=0.05, max_s=2.0, jitter=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A record or column that was not accepted, and why; sending it again is of no use."""

    record_id: str
    reason: str


@dataclass(eq=False, slots=True)
class _Put:
    """One call of `put`: done when none of its frames is left."""

    frames_left: int
    done: asyncio.Future[None]
    rejected: list[Rejected] = field(default_factory=list[Rejected])


@dataclass(eq=False, slots=True)
class _Frame:
    pieces: tuple[Piece, ...]
    num_bytes: int
    put: _Put
    sequence: int = 0


class PutSender:
    """Sends records to one table. Not for use from several event loops.

    Args:
        channel: Owned by the caller.
        table: The table.
        producer_id: Unique to this object: a restarted producer needs another one.
        frame_bytes: Records are gathered into frames of about this size, larger ones are cut.
        reconnect_s: How long a broken connection is tried again before the waiting puts fail.
    """

    def __init__(
        self, channel: grpc.aio.Channel, table: str, producer_id: str, *, frame_bytes: int, reconnect_s: float
    ) -> None:
        self._stub = rpc.BufferServiceStub(channel)
        self._table = table
        self._producer_id = producer_id
        self._frame_bytes = frame_bytes
        self._reconnect_s = reconnect_s
        self._unsent: deque[_Frame] = deque()
        self._unacked: deque[_Frame] = deque()
        self._unacked_bytes = 0
        self._credit_bytes = 0
        self._sequence = 0
        self._puts: dict[str, _Put] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._broken_since: float | None = None
        self._failures = 0
        self._rng = random.Random()

    @property
    def unacked_bytes(self) -> int:
        """Bytes that were sent and are not acknowledged."""
        return self._unacked_bytes

    async def put(self, records: Sequence[tuple[RecordHeader, bytes]]) -> tuple[Rejected, ...]:
        """Send records; returns when each is stored or rejected.

        Cancelling withdraws the frames that were not sent; records in those that were may be stored.

        Raises:
            ActorLostError: The server was not reachable for `reconnect_s` seconds.
            HeadraceError: What the server refused the stream with.
        """
        if not records:
            return ()
        put = _Put(0, asyncio.get_running_loop().create_future())
        for pieces in cut_frames(records, self._frame_bytes):
            self._unsent.append(_Frame(pieces, sum(piece.stop - piece.start for piece in pieces), put))
            put.frames_left += 1
        self._puts.update((header.record_id, put) for header, _ in records)
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"put {self._table}")
        try:
            await put.done
        except asyncio.CancelledError:
            self._unsent = deque(frame for frame in self._unsent if frame.put is not put or frame.sequence)
            raise
        finally:
            for header, _ in records:
                if self._puts.get(header.record_id) is put:
                    del self._puts[header.record_id]
        return tuple(put.rejected)

    async def close(self) -> None:
        """Stop sending; puts that still wait fail. May be called twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self._fail(ActorLostError(f"the client of table {self._table!r} was closed before its records were accepted"))

    async def _run(self) -> None:
        """Keep a stream open for as long as there is something to send."""
        while True:
            call = self._stub.Put()
            try:
                await self._exchange(call)
            except grpc.aio.AioRpcError as error:
                self._give_up_or_retry(error_from_rpc(error, f"putting records into table {self._table!r}"))
            finally:
                call.cancel()
            self._send_again()
            if not self._unsent:
                return  # the next put starts a new task
            delay_s = _RECONNECT.next_delay(self._failures, self._rng, 0.0, Deadline())
            self._failures += 1
            await asyncio.sleep(delay_s or 0.0)

    async def _exchange(self, call: "Call") -> None:
        """Write frames and read answers until either ends; raises what ended the call."""
        reading = asyncio.create_task(self._read(call))
        writing = asyncio.create_task(self._write(call))
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, writing):
                task.cancel()
            await asyncio.wait({reading, writing})
        for task in (reading, writing):
            if not task.cancelled():
                task.result()

    async def _write(self, call: "Call") -> None:
        while True:
            while self._unsent and self._may_send(self._unsent[0]):
                frame = self._unsent.popleft()
                if not frame.sequence:
                    self._sequence += 1
                    frame.sequence = self._sequence
                self._unacked.append(frame)
                self._unacked_bytes += frame.num_bytes
                with contextlib.suppress(asyncio.InvalidStateError):  # the call has ended; its reader says why
                    await call.write(self._request(frame))
            self._wake.clear()
            await self._wake.wait()

    def _may_send(self, frame: _Frame) -> bool:
        return not self._unacked or self._unacked_bytes + frame.num_bytes <= self._credit_bytes

    def _request(self, frame: _Frame) -> pb.PutRequest:
        return pb.PutRequest(
            table=self._table,
            producer_id=self._producer_id,
            sequence=frame.sequence,
            records=[piece.to_proto() for piece in frame.pieces],
        )

    async def _read(self, call: "Call") -> None:
        # What is not an answer is the end of the stream.
        while isinstance(answer := await call.read(), pb.PutResponse):
            self._broken_since, self._failures = None, 0
            for rejected in answer.rejected:
                put = self._puts.get(rejected.record_id)
                if put is not None:
                    put.rejected.append(Rejected(record_id=rejected.record_id, reason=rejected.reason))
            while self._unacked and self._unacked[0].sequence <= answer.acked_sequence:
                frame = self._unacked.popleft()
                self._unacked_bytes -= frame.num_bytes
                frame.put.frames_left -= 1
                if frame.put.frames_left == 0 and not frame.put.done.done():
                    frame.put.done.set_result(None)
            self._credit_bytes = answer.credit_bytes
            self._wake.set()

    def _send_again(self) -> None:
        """What was not acknowledged goes to the front again, in order."""
        self._unsent.extendleft(reversed(self._unacked))
        self._unacked.clear()
        self._unacked_bytes = 0
        self._credit_bytes = 0

    def _give_up_or_retry(self, error: HeadraceError) -> None:
        """Fail the waiting puts unless the connection may come back in time."""
        now = SystemClock().monotonic()
        self._broken_since = self._broken_since or now
        if not isinstance(error, ActorLostError) or now - self._broken_since > self._reconnect_s:
            self._fail(error)

    def _fail(self, error: HeadraceError) -> None:
        frames = [*self._unacked, *self._unsent]
        self._unacked.clear()
        self._unsent.clear()
        self._unacked_bytes = 0
        self._broken_since = None
        # The next stream begins with a frame that was never sent, so no number may stay unused before it.
        for put in {frame.put for frame in frames}:
            if not put.done.done():
                put.done.set_exception(error)
