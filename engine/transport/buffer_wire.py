"""Records on the wire: headers, frames of about 1 MiB, and records larger than a frame in pieces. Both ends use it.

A piece of a record holds bytes [offset, offset + length) of it; the first has the header, the others follow in order
without any other record between them. Columns travel behind the last piece of their record.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headrace.engine.errors import FormatError
from headrace.engine.transport.convert import version_from_proto, version_to_proto
from headrace.engine.types import MicroBatchPlan
from headrace.engine.types.records import RecordHeader
from headrace.v1 import buffer_pb2
from headrace.v1 import trajectory_pb2 as pb

MAX_RECORD_BYTES = 64 << 20
CALL_TIMEOUT_S = 30.0


def header_to_proto(header: RecordHeader) -> pb.RecordHeader:
    """The wire's form of a header."""
    return pb.RecordHeader(
        record_id=header.record_id,
        group_id=header.group_id,
        sample_index=header.sample_index,
        attempt=header.attempt,
        group_size=header.group_size,
        oldest_version=version_to_proto(header.oldest_version),
        newest_version=version_to_proto(header.newest_version),
        num_prompt_tokens=header.num_prompt_tokens,
        num_response_tokens=header.num_response_tokens,
        num_loss_tokens=header.num_loss_tokens,
        mean_version=header.mean_version,
    )


def header_from_proto(message: pb.RecordHeader) -> RecordHeader:
    """Our form of a header."""
    return RecordHeader(
        record_id=message.record_id,
        group_id=message.group_id,
        sample_index=message.sample_index,
        attempt=message.attempt,
        group_size=message.group_size,
        oldest_version=version_from_proto(message.oldest_version),
        newest_version=version_from_proto(message.newest_version),
        num_prompt_tokens=message.num_prompt_tokens,
        num_response_tokens=message.num_response_tokens,
        num_loss_tokens=message.num_loss_tokens,
        mean_version=message.mean_version,
    )


def micro_batch_to_proto(plan: MicroBatchPlan) -> buffer_pb2.MicroBatchPlan:
    """The wire's form of a micro-batch's plan."""
    return buffer_pb2.MicroBatchPlan(record_ids=plan.record_ids, num_tokens=plan.num_tokens, shared=plan.shared)


def micro_batch_from_proto(message: buffer_pb2.MicroBatchPlan) -> MicroBatchPlan:
    """Our form of a micro-batch's plan.

    Raises:
        FormatError: The sharing units are empty or do not add up to the records.
    """
    shared = tuple(message.shared)
    if shared and (0 in shared or sum(shared) != len(message.record_ids)):
        raise FormatError(
            f"a micro-batch of {len(message.record_ids)} records came with {len(shared)} sharing units of "
            f"{sum(shared)} records; each needs at least one, and they must add up"
        )
    return MicroBatchPlan(record_ids=tuple(message.record_ids), num_tokens=message.num_tokens, shared=shared)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of one record. Holds the record itself: nothing is copied before the piece is sent."""

    header: RecordHeader
    data: bytes
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """The record ends with this piece."""
        return self.stop == len(self.data)

    def to_proto(self) -> pb.EncodedRecord:
        """The message that is sent."""
        return pb.EncodedRecord(
            header=header_to_proto(self.header) if self.start == 0 else None,
            data=self.data if self.start == 0 and self.is_last else self.data[self.start : self.stop],
            offset=self.start,
            total_bytes=len(self.data),
        )


def cut_frames(records: Iterable[tuple[RecordHeader, bytes]], frame_bytes: int) -> Iterator[tuple[Piece, ...]]:
    """Divide records into frames: small ones together, large ones in pieces. Yields no empty frame.

    A record that would begin in one frame and end in the next begins in the next, so only records that are larger than
    a frame are cut.
    """
    frame: list[Piece] = []
    room = frame_bytes
    for header, data in records:
        start = 0
        while True:
            left = len(data) - start
            if frame and left > room:
                yield tuple(frame)
                frame, room = [], frame_bytes
            stop = start + min(left, frame_bytes)
            frame.append(Piece(header, data, start, stop))
            room -= stop - start
            start = stop
            if start == len(data):
                break
    if frame:
        yield tuple(frame)


@dataclass(frozen=True, slots=True)
class Whole:
    """A record that has arrived."""

    header: RecordHeader
    data: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """A record that can no longer arrive, and why."""

    record_id: str
    reason: str


class Assembler:
    """Puts the pieces of one stream together. Holds at most one unfinished record.

    Nothing is allocated by what a piece announces: memory grows with the bytes that have come, and a record that
    announces more than `max_record_bytes` is refused at its first piece.
    """

    def __init__(self, max_record_bytes: int = MAX_RECORD_BYTES) -> None:
        self._max = max_record_bytes
        self._header: RecordHeader | None = None
        self._pieces: list[bytes] = []
        self._received = 0
        self._total = 0
        self._skipping = False

    @property
    def received_bytes(self) -> int:
        """Bytes that are kept for the unfinished record; 0 where there is none."""
        return self._received

    @property
    def unfinished(self) -> bool:
        """A record has begun and not ended."""
        return self._header is not None

    def skip_rest(self) -> None:
        """Ignore pieces without a beginning until a record begins: theirs was dealt with before this stream."""
        self._skipping = True

    def feed(self, piece: pb.EncodedRecord) -> list[Whole | Broken]:
        """Take the next piece; returns what it completes or breaks."""
        if not piece.HasField("header"):
            return self._continue(piece)
        broken = self._broken("its last piece never came") if self._header is not None else []
        self._skipping = False
        header = header_from_proto(piece.header)
        data, total = piece.data, piece.total_bytes
        self._header = header
        if piece.offset != 0 or len(data) > total:
            return broken + self._broken(f"its first piece is {len(data)} of {total} bytes at offset {piece.offset}")
        if total > self._max:
            return broken + self._broken(f"it has {total} bytes, and the most is {self._max}")
        if len(data) == total:
            self._header = None
            return [*broken, Whole(header, data)]
        self._pieces, self._received, self._total = [data], len(data), total
        return list(broken)

    def _continue(self, piece: pb.EncodedRecord) -> list[Whole | Broken]:
        header = self._header
        if header is None:
            return [] if self._skipping else [Broken("", f"a piece at offset {piece.offset} has no beginning")]
        data = piece.data
        if piece.offset != self._received or piece.total_bytes != self._total or not data:
            return self._broken(
                f"a piece of {len(data)} bytes at offset {piece.offset} of {piece.total_bytes} "
                f"does not follow {self._received} of {self._total}"
            )
        if self._received + len(data) > self._total:
            return self._broken(f"its pieces have more than the {self._total} bytes that it announced")
        self._pieces.append(data)
        self._received += len(data)
        if self._received < self._total:
            return []
        whole = b"".join(self._pieces)
        self._clear()
        return [Whole(header, whole)]

    def _broken(self, reason: str) -> list[Whole | Broken]:
        assert self._header is not None
        record_id = self._header.record_id
        self._clear()
        self._skipping = True
        return [Broken(record_id, f"record {record_id!r} did not arrive: {reason}")]

    def _clear(self) -> None:
        self._header, self._pieces, self._received, self._total = None, [], 0, 0


def whole_records(assembler: Assembler, pieces: Iterable[pb.EncodedRecord]) -> Iterator[Whole]:
    """The records that some pieces complete.

    Raises:
        FormatError: A piece does not belong where it is.
    """
    for piece in pieces:
        for outcome in assembler.feed(piece):
            if isinstance(outcome, Broken):
                raise FormatError(outcome.reason)
            yield outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """A table at one moment; counters count records since the table's start.

    Attributes:
        num_records, num_groups, num_bytes: Stored now, leased and held ones included.
        num_added: Accepted so far.
        num_evicted: Removed so far by the eviction policy.
        num_sampled: Leased so far.
        num_leased: Leased now.
    """

    num_records: int
    num_groups: int
    num_bytes: int
    num_added: int
    num_evicted: int
    num_sampled: int
    num_leased: int


def stats_from_proto(message: buffer_pb2.GetStatsResponse) -> BufferStats:
    """Our form of a table's statistics."""
    return BufferStats(
        num_records=message.num_records,
        num_groups=message.num_groups,
        num_bytes=message.num_bytes,
        num_added=message.num_added,
        num_evicted=message.num_evicted,
        num_sampled=message.num_sampled,
        num_leased=message.num_leased,
    )
