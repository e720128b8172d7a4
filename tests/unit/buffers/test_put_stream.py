"""A producer's stream at the server: acknowledgements, credit, what is sent again."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from headrace.buffers.async_table import AsyncTable
from headrace.buffers.groups import ReadyGroup
from headrace.buffers.put_stream import Producers, PutStream
from headrace.buffers.table import Table
from headrace.buffers.table_backend import TableBackend
from headrace.engine.errors import FormatError, SchemaError, UsageError
from headrace.engine.transport.buffer_wire import cut_frames
from headrace.engine.types.records import RecordHeader
from headrace.v1 import buffer_pb2 as pb

MakeHeader = Callable[..., RecordHeader]


class Server:
    """A backend and the streams of one producer."""

    def __init__(self, window_bytes: int = 100, **options: int) -> None:
        self.table = AsyncTable(Table("train", **options))  # type: ignore[arg-type]
        self.backend = TableBackend({"train": self.table}, groups_per_step=1, token_budget=100, check=None)
        self.producers = Producers()
        self.window_bytes = window_bytes

    def stream(self) -> PutStream:
        return PutStream(self.backend, self.producers, window_bytes=self.window_bytes, max_record_bytes=1000)

    async def free_all(self, step: int) -> None:
        def everything(ready: list[ReadyGroup]) -> list[str]:
            return [group.group_id for group in ready]

        lease = await self.table.take(step, everything)
        self.table.commit(step, lease.token)


def frames(records: Sequence[tuple[RecordHeader, bytes]], frame_bytes: int = 10) -> list[pb.PutRequest]:
    return [
        pb.PutRequest(table="train", producer_id="p", sequence=number, records=[piece.to_proto() for piece in frame])
        for number, frame in enumerate(cut_frames(records, frame_bytes), start=1)
    ]


async def answer(stream: PutStream) -> tuple[int, int, list[str]]:
    got = await stream.answer()
    assert got is not None
    return got.acked_sequence, got.credit_bytes, [rejected.record_id for rejected in got.rejected]


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_frames_are_acknowledged_by_sequence_and_the_end_is_seen(header: MakeHeader) -> None:
    server = Server()
    stream = server.stream()
    for request in frames([(header(f"g{n}"), bytes(10)) for n in range(3)]):
        await stream.feed(request)
    assert await answer(stream) == (3, 100, [])
    stream.finish()
    assert await stream.answer() is None


async def test_a_frame_sent_again_is_stored_once_and_gets_its_rejections_again(header: MakeHeader) -> None:
    server = Server()
    requests = frames([(header("g"), bytes(10)), (header(""), bytes(10))])
    for _ in range(2):
        stream = server.stream()
        for request in requests:
            await stream.feed(request)
        assert await answer(stream) == (2, 100, ["/0/0"])
    stats = server.table.stats()
    assert (stats.num_added, stats.num_duplicates, stats.num_refused) == (1, 0, 1)


async def test_a_stream_may_begin_after_frames_that_another_server_acknowledged(header: MakeHeader) -> None:
    stream = Server().stream()
    third = frames([(header(f"g{n}"), bytes(10)) for n in range(3)])[2]
    await stream.feed(third)
    assert (await answer(stream))[0] == 3


async def test_a_gap_in_the_sequence_is_an_error(header: MakeHeader) -> None:
    stream = Server().stream()
    first, _, third = frames([(header(f"g{n}"), bytes(10)) for n in range(3)])
    await stream.feed(first)
    with pytest.raises(FormatError, match="frame 3 follows frame 1"):
        await stream.feed(third)


async def test_a_stream_is_for_one_known_table_and_one_named_producer(header: MakeHeader) -> None:
    request = frames([(header("g"), b"x")])[0]
    with pytest.raises(SchemaError, match="no table 'other'"):
        await Server().stream().feed(pb.PutRequest(table="other", producer_id="p", sequence=1))
    for malformed in (pb.PutRequest(table="train", sequence=1), pb.PutRequest(table="train", producer_id="p")):
        with pytest.raises(UsageError, match="producer_id"):
            await Server().stream().feed(malformed)
    stream = Server().stream()
    await stream.feed(request)
    with pytest.raises(UsageError, match="one table and one producer"):
        await stream.feed(pb.PutRequest(table="train", producer_id="q", sequence=2))


async def test_no_frame_of_a_large_record_is_acknowledged_before_the_record_is_stored(header: MakeHeader) -> None:
    server = Server()
    stream = server.stream()
    *beginning, end = frames([(header("small"), bytes(5)), (header("large"), bytes(range(35)))])
    for number, request in enumerate(beginning):
        await stream.feed(request)
        # The small record's frame is done; the credit grows by what is kept of the large one.
        assert await answer(stream) == (1, 100 + 10 * number, [])
    await stream.feed(end)
    assert await answer(stream) == (5, 100, [])
    assert server.table.table.record("large/0/0").data == bytes(range(35))  # type: ignore[union-attr]


async def test_a_record_cut_by_a_broken_stream_arrives_with_the_next(header: MakeHeader) -> None:
    server = Server()
    requests = frames([(header("large"), bytes(35))])
    first = server.stream()
    for request in requests[:2]:
        await first.feed(request)
    await first.close()
    second = server.stream()
    for request in requests:
        await second.feed(request)
    assert await answer(second) == (4, 100, [])
    assert server.table.stats().num_added == 1


async def test_the_end_of_a_record_that_was_stored_before_the_break_is_skipped(header: MakeHeader) -> None:
    server = Server(capacity_records=1)
    # Frame 2 ends the large record and has another one, which waits for room: acknowledged are frames up to 1.
    requests = frames([(header("large"), bytes(15)), (header("waits"), bytes(5))])
    assert [len(request.records) for request in requests] == [1, 2]
    first = server.stream()
    for request in requests:
        await first.feed(request)
    assert (await answer(first))[0] == 1
    await first.close()
    second = server.stream()
    await second.feed(requests[1])
    await server.free_all(0)
    await _settle()
    assert await answer(second) == (2, 100, [])
    assert (server.table.stats().num_added, server.table.stats().num_refused) == (2, 0)


async def test_a_full_table_keeps_frames_unacknowledged_and_others_go_on(header: MakeHeader) -> None:
    server = Server(capacity_records=2)
    stream = server.stream()
    records = [(header("a", 0, size=2), bytes(10)), (header("b"), bytes(10)), (header("a", 1, size=2), bytes(10))]
    for request in frames(records):
        await stream.feed(request)
    assert (await answer(stream))[0] == 1, "the second frame waits for room"
    assert server.table.table.num_ready == 1, "the third is in the table all the same: its group had begun"
    await server.free_all(0)
    await _settle()
    assert (await answer(stream))[0] == 3


async def test_stream_backpressure_a_producer_beyond_its_credit_is_not_read(header: MakeHeader) -> None:
    server = Server(window_bytes=20, capacity_records=1)
    stream = server.stream()
    requests = iter(frames([(header(f"g{n}"), bytes(10)) for n in range(6)]))

    async def feed_all() -> None:
        for request in requests:
            await stream.feed(request)

    feeding = asyncio.create_task(feed_all())
    await _settle()
    assert len(list(requests)) == 2, "one is stored, two fill the window, one more is held"
    assert len(server.table.waits()) == 3
    for step in range(2):
        await server.free_all(step)
        await _settle()
    assert feeding.done()
    await stream.close()
    assert server.table.waits() == []


async def test_an_error_ends_the_stream_at_once(header: MakeHeader) -> None:
    server = Server(capacity_records=1)
    stream = server.stream()
    for request in frames([(header(f"g{n}"), bytes(10)) for n in range(2)]):
        await stream.feed(request)
    stream.finish(FormatError("bad"))
    with pytest.raises(FormatError, match="bad"):
        await stream.answer()
    await stream.close()
    assert server.table.waits() == []
