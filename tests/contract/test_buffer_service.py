"""The buffer service over real gRPC, with servers, producers and consumers in processes of their own."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.clients.buffer import encode_column, open_channel
from headrace.engine.errors import DeadlineError, FencedError, SchemaError, UsageError
from headrace.engine.types import PolicyVersion
from headrace.engine.types.records import RecordHeader
from headrace.v1 import buffer_pb2 as pb
from headrace.v1 import buffer_pb2_grpc as rpc

Start = Callable[..., Any]
Header = Callable[..., RecordHeader]
MIB = 1 << 20


async def test_ranks_get_their_own_records_and_columns_of_one_plan(start_buffer: Start, record_header: Header) -> None:
    server = start_buffer(groups_per_step=2, table={"required_columns": ["reward"]})
    records = [
        (record_header(f"g{g}", i, size=4, version=3, tokens=10 + i), bytes([g, i])) for g in range(2) for i in range(4)
    ]
    async with server.producer() as client:
        assert await client.put("train", records) == ()
        columns = [
            (h.record_id, "reward", encode_column("reward", np.array(n, np.float64)))
            for n, (h, _) in enumerate(records)
        ]
        assert await client.put_columns("train", columns) == ()
        assert (await client.stats("train")).num_records == 8
    shares = []
    for rank in range(2):
        with server.consumer(rank=rank, num_ranks=2) as client:
            shares.append(client.take(5, 10.0))
    assert shares[0].lease_token == shares[1].lease_token
    assert len(shares[0].micro_batches) == len(shares[1].micro_batches)
    got = shares[0].records | shares[1].records
    assert len(shares[0].records) == len(shares[1].records) == 4
    assert got == {h.record_id: data for h, data in records}
    assert {r: c["reward"] for share in shares for r, c in share.columns.items()} == {r: c for r, _, c in columns}
    for share in shares:
        assert (share.num_sequences, share.num_groups, share.num_loss_tokens) == (8, 2, 2 * (10 + 11 + 12 + 13))
        assert (share.mean_lag, share.max_lag) == (2.0, 2)
    with server.consumer(rank=0, num_ranks=3) as client, pytest.raises(UsageError, match="planned for 2 ranks"):
        client.take(5, 5.0)


async def test_message_size_a_trajectory_of_6_mib_goes_both_ways(start_buffer: Start, record_header: Header) -> None:
    server = start_buffer(service={"window_bytes": MIB})
    data = np.random.default_rng(1).bytes(6 * MIB + 17)
    async with server.producer() as client:
        assert await client.put("train", [(record_header("small"), b"x"), (record_header("large"), data)]) == ()
    with server.consumer() as client:
        got: dict[str, bytes] = {}
        for step in range(2):
            batch = client.take(step, 10.0)
            got |= batch.records
            client.commit(step, batch.lease_token)
    assert got == {"small/0/0": b"x", "large/0/0": data}


async def test_message_size_what_is_too_large_is_rejected_and_not_retried(
    start_buffer: Start, record_header: Header
) -> None:
    server = start_buffer(service={"max_record_bytes": 2 * MIB})
    async with server.producer() as client:
        rejected = await client.put("train", [(record_header("large"), bytes(3 * MIB)), (record_header("small"), b"x")])
    assert [(one.record_id, "the most is 2097152" in one.reason) for one in rejected] == [("large/0/0", True)]
    assert server.ask("stats")["num_records"] == 1


async def test_a_malformed_record_is_rejected_and_the_stream_goes_on(
    start_buffer: Start, record_header: Header
) -> None:
    server = start_buffer()
    async with server.producer() as client:
        rejected = await client.put(
            "train", [(record_header(""), b"x"), (record_header("good"), b"x"), (record_header("late", 3), b"x")]
        )
        assert [one.record_id for one in rejected] == ["/0/0", "late/3/0"]
        assert await client.put("train", [(record_header("good"), b"x"), (record_header("next"), b"x")]) == ()
        with pytest.raises(SchemaError, match="the tables are train"):
            await client.put("trian", [(record_header("x"), b"x")])
        bad = await client.put_columns("train", [("good/0/0", "reward", b"no column"), ("nobody", "reward", b"")])
        assert [one.record_id for one in bad] == ["good/0/0", "nobody"]
    stats = server.ask("stats")
    assert (stats["num_added"], stats["num_duplicates"], stats["num_refused"]) == (2, 1, 2)


async def test_sample_never_hangs_the_deadline_names_what_is_missing(
    start_buffer: Start, record_header: Header
) -> None:
    server = start_buffer(groups_per_step=2)
    async with server.producer() as client:
        await client.put("train", [(record_header("g1", 0, size=2), b"x"), (record_header("g2"), b"x")])
    with server.consumer() as client, pytest.raises(DeadlineError, match="'g1' attempt 0 has 1 of 2 records, sample 1"):
        client.take(0, 0.5)
    assert server.ask("waits") == []


async def test_silent_eviction_a_full_table_holds_the_producer_and_loses_nothing(
    start_buffer: Start, record_header: Header
) -> None:
    server = start_buffer(table={"capacity_records": 4})
    trained: list[str] = []
    async with server.producer() as client:
        puts = [asyncio.create_task(client.put("train", [(record_header(f"g{n}"), b"x")])) for n in range(6)]
        await server.waits()
        with pytest.raises(DeadlineError, match="the table is full"):
            await client.put("train", [(record_header("impatient"), b"x")], deadline_s=0.3)
        assert [put.done() for put in puts].count(False) == 2
        with server.consumer() as learner:
            for step in range(6):
                batch = await asyncio.to_thread(learner.take, step, 10.0)
                trained.extend(batch.records)
                learner.commit(step, batch.lease_token)
            await asyncio.gather(*puts)
    assert sorted(trained) == [f"g{n}/0/0" for n in range(6)]


@pytest.mark.parametrize("proven", [True, False])
async def test_a_killed_consumer_gives_its_records_to_the_next_incarnation(
    start_buffer: Start, record_header: Header, proven: bool
) -> None:
    server = start_buffer(groups_per_step=2)
    async with server.producer() as client:
        await client.put("train", [(record_header(f"g{n}"), b"x") for n in range(4)])
    dead = start_buffer("take", step=0, incarnation=1)
    leased = dead.hear()
    dead.kill()
    if proven:
        assert server.ask("lost", "learner", 1) == "done"
    trained: list[str] = []
    with server.consumer(incarnation=2) as client:
        for step in range(2):
            batch = client.take(step, 10.0)
            trained.extend(batch.records)
            assert client.commit(step, batch.lease_token) == PolicyVersion(0, step + 1)
            assert client.commit(step, batch.lease_token) == PolicyVersion(0, step + 1), "a lost reply"
    assert set(leased) <= set(trained)
    assert sorted(trained) == [f"g{n}/0/0" for n in range(4)]
    assert server.ask("stats")["num_freed"] == 4


async def test_a_stopped_and_resumed_zombie_can_do_no_harm(start_buffer: Start, record_header: Header) -> None:
    server = start_buffer()
    async with server.producer() as client:
        await client.put("train", [(record_header("g"), b"x")])
    zombie = start_buffer("take", step=0, incarnation=1)
    zombie.hear()
    zombie.process.send_signal(signal.SIGSTOP)
    with server.consumer(incarnation=2) as client:
        batch = client.take(0, 10.0)
        zombie.process.send_signal(signal.SIGCONT)
        assert zombie.ask("commit")[0] == "FencedError"
        assert client.commit(0, batch.lease_token) == PolicyVersion(0, 1)
        with pytest.raises(FencedError, match="already committed"):
            client.take(0, 5.0)
    assert server.ask("stats")["num_freed"] == 1


async def test_a_producer_killed_in_the_middle_of_a_record_leaves_nothing(
    start_buffer: Start, record_header: Header
) -> None:
    server = start_buffer(service={"window_bytes": MIB})
    before = server.ask("memory")["tasks"]
    half = start_buffer("half_put", record_id="g/0/0", group_id="g", until_credit=4 * MIB)
    assert half.hear() == "half sent"
    half.kill()
    whole = bytes(6 * MIB)
    async with server.producer() as client:
        assert await client.put("train", [(record_header("g"), whole)]) == ()
    with server.consumer() as client:
        assert client.take(0, 10.0).records == {"g/0/0": whole}
    assert server.ask("stats")["num_added"] == 1
    give_up = time.monotonic() + 30
    while server.ask("memory")["tasks"] > before + 2:  # this consumer's call and producer's stream may linger
        assert time.monotonic() < give_up


async def test_a_restarted_server_gets_what_was_not_acknowledged(start_buffer: Start, record_header: Header) -> None:
    server = start_buffer(table={"capacity_records": 4})
    async with server.producer(reconnect_s=20.0) as client:
        await client.put("train", [(record_header("before"), b"x")])
        waiting = asyncio.create_task(client.put("train", [(record_header(f"g{n}"), b"x") for n in range(6)]))
        await server.waits()
        server.kill()
        server = start_buffer(table={"capacity_records": 8})
        assert await waiting == ()
    assert server.ask("stats")["num_added"] == 6


async def test_a_take_without_a_deadline_waits_and_leaves_nothing_when_cancelled(start_buffer: Start) -> None:
    server = start_buffer()
    async with open_channel(server.address) as channel:
        call = rpc.BufferServiceStub(channel).Take(pb.TakeRequest(table="train", consumer_id="c", num_ranks=1))
        reading = asyncio.create_task(call.read())
        assert await server.waits() == [["c (incarnation 0)", "the batch of step 0 of table 'train'"]]
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        give_up = time.monotonic() + 30
        while server.ask("waits"):
            assert time.monotonic() < give_up
