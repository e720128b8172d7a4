"""One producer's stream of frames at the server: reassembly, acknowledgement by sequence, credit in bytes.

Consumes frames; produces answers (acknowledged sequence, credit, rejected records); waits for room in the table.

Invariants:
    * A frame is acknowledged when every record that has bytes in it is stored or rejected, and all frames before it
      are. So a producer that sends again what was not acknowledged loses nothing, however the stream broke.
    * A frame that was acknowledged before, on any stream of its producer, is not looked into again.
    * What this stream keeps is bounded: `window_bytes` of frames that wait for room, and one unfinished record. While a
      producer sends more than its credit, its stream is not read.
    * One bad record is reported and skipped; the stream goes on.
"""

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from headrace.buffers.backend import BufferBackend
from headrace.buffers.groups import PutStatus, PutVerdict
from headrace.engine.errors import FormatError, HeadraceError, UsageError
from headrace.engine.transport.buffer_wire import Assembler, Broken, Whole
from headrace.v1 import buffer_pb2 as pb
from headrace.v1 import trajectory_pb2

_REMEMBERED_REJECTIONS = 256
_REMEMBERED_PRODUCERS = 4096

Rejection = tuple[str, str]


@dataclass(slots=True)
class Producer:
    """What outlives a stream: the last acknowledged frame, and what was rejected in recent ones."""

    acked: int = 0
    rejected: OrderedDict[int, list[Rejection]] = field(default_factory=OrderedDict[int, list[Rejection]])

    def reject(self, sequence: int, rejection: Rejection) -> None:
        """Remember a rejection, so that a frame sent again for want of an answer gets it again."""
        self.rejected.setdefault(sequence, []).append(rejection)
        while len(self.rejected) > _REMEMBERED_REJECTIONS:
            self.rejected.popitem(last=False)


class Producers:
    """The producers that were heard of; the least recent is forgotten first. A restarted producer has a new id."""

    def __init__(self) -> None:
        self._producers: OrderedDict[tuple[str, str], Producer] = OrderedDict()

    def get(self, table: str, producer_id: str) -> Producer:
        """The state of one producer of one table."""
        key = (table, producer_id)
        producer = self._producers.setdefault(key, Producer())
        self._producers.move_to_end(key)
        while len(self._producers) > _REMEMBERED_PRODUCERS:
            self._producers.popitem(last=False)
        return producer


@dataclass(eq=False, slots=True)
class _Frame:
    sequence: int
    num_bytes: int
    pending: int = 0


class PutStream:
    """The state of one Put call. `feed` and `answer` are for one task each; `close` ends what they left waiting.

    Args:
        backend: Takes the records.
        producers: Shared by the streams of a server.
        window_bytes: Credit beyond what is acknowledged.
        max_record_bytes: Largest record.
    """

    def __init__(
        self, backend: BufferBackend, producers: Producers, *, window_bytes: int, max_record_bytes: int
    ) -> None:
        self._backend = backend
        self._producers = producers
        self._window_bytes = window_bytes
        self._assembler = Assembler(max_record_bytes)
        self._table = ""
        self._producer_id = ""
        self._producer: Producer | None = None
        self._frames: deque[_Frame] = deque()
        # Frames that hold the beginning of the record that is being assembled.
        self._begun: list[_Frame] = []
        self._unacked_bytes = 0
        self._last_sequence = 0
        self._rejected: list[Rejection] = []
        self._answered: tuple[int, int] | None = None
        self._stalled: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._finished = False
        self._failure: BaseException | None = None

    @property
    def credit_bytes(self) -> int:
        """Bytes that the producer may have sent beyond what is acknowledged.

        It grows with the unfinished record, which could not be finished otherwise when it is larger than the window.
        """
        return self._window_bytes + self._assembler.received_bytes

    async def feed(self, request: pb.PutRequest) -> None:
        """Take one frame; waits while the producer has more under way than its credit.

        Raises:
            UsageError: The stream changes its table or producer.
            SchemaError: There is no such table.
            FormatError: A frame is missing between this one and the one before.
        """
        producer = self._introduce(request)
        if request.sequence <= producer.acked:
            self._rejected.extend(producer.rejected.get(request.sequence, ()))
            self._last_sequence = request.sequence
            self._assembler.skip_rest()
            self._changed.set()
            return
        if self._last_sequence == 0:
            # The frames before were acknowledged to the producer, be it by an earlier server.
            producer.acked = request.sequence - 1
            if request.sequence > 1:
                self._assembler.skip_rest()
        elif request.sequence != self._last_sequence + 1:
            raise FormatError(f"frame {request.sequence} follows frame {self._last_sequence}; frames count by one")
        self._last_sequence = request.sequence
        frame = _Frame(request.sequence, sum(len(piece.data) for piece in request.records), pending=1)
        self._frames.append(frame)
        self._unacked_bytes += frame.num_bytes
        for piece in request.records:
            self._take(frame, piece)
        if self._assembler.unfinished:
            self._begun.append(frame)
            frame.pending += 1
        self._done([frame])
        while self._unacked_bytes > self.credit_bytes and self._stalled:
            await asyncio.wait(self._stalled, return_when=asyncio.FIRST_COMPLETED)

    def finish(self, failure: BaseException | None = None) -> None:
        """The producer sends no more, or something went wrong that ends the stream at once."""
        self._finished = True
        self._failure = self._failure or failure
        self._changed.set()

    async def answer(self) -> pb.PutResponse | None:
        """The next answer, as soon as there is one; None when all frames of a finished stream are answered.

        Raises:
            BaseException: What the stream was finished with.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            acked = self._producer.acked if self._producer is not None else 0
            state = (acked, self.credit_bytes)
            if state != self._answered or self._rejected:
                self._answered = state
                rejected, self._rejected = self._rejected, []
                return pb.PutResponse(
                    acked_sequence=acked,
                    credit_bytes=state[1],
                    rejected=[pb.RejectedRecord(record_id=record_id, reason=reason) for record_id, reason in rejected],
                )
            if self._finished and not self._stalled:
                return None
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Withdraw the records that wait for room. May be called twice."""
        for task in self._stalled:
            task.cancel()
        await asyncio.gather(*self._stalled, return_exceptions=True)

    def _introduce(self, request: pb.PutRequest) -> Producer:
        if self._producer is None:
            if not request.producer_id or request.sequence < 1:
                raise UsageError("a Put stream needs a producer_id, and frames that are counted from 1")
            self._backend.stats(request.table)  # refuses an unknown table
            self._table, self._producer_id = request.table, request.producer_id
            self._producer = self._producers.get(request.table, request.producer_id)
        elif (request.table, request.producer_id) != (self._table, self._producer_id):
            raise UsageError("a Put stream is for one table and one producer; open another stream")
        return self._producer

    def _take(self, frame: _Frame, piece: trajectory_pb2.EncodedRecord) -> None:
        for outcome in self._assembler.feed(piece):
            begun, self._begun = self._begun, []
            if isinstance(outcome, Broken):
                self._reject(frame, outcome.record_id, outcome.reason)
                self._done(begun)
            else:
                self._offer(frame, begun, outcome)

    def _offer(self, frame: _Frame, begun: list[_Frame], record: Whole) -> None:
        verdict = self._tried(frame, record)
        if verdict is not None and verdict.status is PutStatus.FULL:
            frame.pending += 1
            task = asyncio.create_task(self._put_later(frame, begun, record))
            self._stalled.add(task)
            task.add_done_callback(self._stall_ended)
            return
        self._judge(frame, record, verdict)
        self._done(begun)

    def _tried(self, frame: _Frame, record: Whole) -> PutVerdict | None:
        try:
            return self._backend.offer_record(self._table, record.header, record.data)
        except HeadraceError as error:
            self._reject(frame, record.header.record_id, str(error))
            return None

    async def _put_later(self, frame: _Frame, begun: list[_Frame], record: Whole) -> None:
        try:
            verdict = await self._backend.put_record(self._table, record.header, record.data, self._producer_id)
        except HeadraceError as error:
            self._reject(frame, record.header.record_id, str(error))
        else:
            self._judge(frame, record, verdict)
        self._done([frame, *begun])

    def _stall_ended(self, task: asyncio.Task[None]) -> None:
        self._stalled.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.finish(task.exception())
        self._changed.set()

    def _judge(self, frame: _Frame, record: Whole, verdict: PutVerdict | None) -> None:
        if verdict is not None and not verdict.accepted:
            self._reject(frame, record.header.record_id, verdict.reason)

    def _reject(self, frame: _Frame, record_id: str, reason: str) -> None:
        assert self._producer is not None
        self._producer.reject(frame.sequence, (record_id, reason))
        self._rejected.append((record_id, reason))
        self._changed.set()

    def _done(self, frames: list[_Frame]) -> None:
        """One thing less is pending in each of these frames; acknowledge as far as there is no gap."""
        for frame in frames:
            frame.pending -= 1
        while self._frames and self._frames[0].pending == 0:
            first = self._frames.popleft()
            self._unacked_bytes -= first.num_bytes
            assert self._producer is not None
            self._producer.acked = max(self._producer.acked, first.sequence)
        self._changed.set()
