"""Memory of the buffer's server and its producers: bounded when the consumer is slow, flat over many steps."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from headrace.clients.buffer import BufferClient
from headrace.engine.types.records import RecordHeader

Start = Callable[..., Any]
Header = Callable[..., RecordHeader]
MIB = 1 << 20


async def test_stream_backpressure_a_slow_consumer_slows_the_producer(
    start_buffer: Start, record_header: Header
) -> None:
    count, half = 200, 100
    server = start_buffer(table={"capacity_records": 8})
    data = bytes(MIB)
    at_start = server.ask("memory")["now"]
    finished: list[int] = []

    async def produce(client: BufferClient, numbers: Iterator[int]) -> None:
        for n in numbers:
            await client.put("train", [(record_header(f"g{n}"), data)])
            finished.append(n)

    async with server.producer() as client:
        numbers = iter(range(count))
        producing = asyncio.gather(*(produce(client, numbers) for _ in range(32)))
        with server.consumer() as learner:
            for step in range(half):
                batch = await asyncio.to_thread(learner.take, step, 10.0)
                await asyncio.to_thread(learner.commit, step, batch.lease_token)
                assert len(finished) <= step + 1 + 8, "the table holds eight, no more can be accepted"
            waits = await server.waits()
            assert 0 < len(waits) <= 8, "what the producer may have under way is one window of 8 MiB"
            assert waits[0][0].startswith("test-") and "room for record" in waits[0][1]
        producing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await producing
    assert server.ask("memory")["peak"] - at_start < 64 * MIB
    give_up = time.monotonic() + 30
    while server.ask("waits"):
        assert time.monotonic() < give_up, "the waits of a producer that has gone end with its stream"


async def test_steady_memory_thousands_of_records_leave_the_server_as_it_was(
    start_buffer: Start, record_header: Header
) -> None:
    server = start_buffer(groups_per_step=8, table={"remember_groups": 200})
    data = bytes(50_000)
    sizes: list[int] = []
    async with server.producer() as client:
        with server.consumer() as learner:
            for step in range(40):
                names = [f"g{step}-{g}" for g in range(8)]
                await client.put("train", [(record_header(name, i, size=8), data) for name in names for i in range(8)])
                batch = await asyncio.to_thread(learner.take, step, 10.0)
                await asyncio.to_thread(learner.commit, step, batch.lease_token)
                sizes.append(server.ask("memory")["now"])
    stats = server.ask("stats")
    assert (stats["num_freed"], stats["num_records"], stats["reserved_bytes"]) == (40 * 64, 0, 0)
    assert max(sizes[20:]) - max(sizes[10:20]) < 8 * MIB
