"""Waiting on a table: room, whole groups, leases, deadlines, cancellation."""

import asyncio
from collections.abc import Callable

import pytest

from headrace.buffers.async_table import AsyncTable
from headrace.buffers.groups import PutStatus, ReadyGroup
from headrace.buffers.table import Table
from headrace.engine.errors import DeadlineError, FencedError, UsageError
from headrace.engine.types.records import RecordHeader

MakeHeader = Callable[..., RecordHeader]


def _all(ready: list[ReadyGroup]) -> list[str] | None:
    return [group.group_id for group in ready] or None


def _oldest(n: int) -> Callable[[list[ReadyGroup]], list[str] | None]:
    return lambda ready: [group.group_id for group in ready[:n]] if len(ready) >= n else None


async def _settle() -> None:
    """Let every task that can run, run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_silent_eviction_the_fifth_put_waits_and_nothing_is_lost(header: MakeHeader) -> None:
    table = AsyncTable(Table("train", capacity_records=4))
    puts = [asyncio.create_task(table.put(header(f"g{n}"), b"x", who=f"p{n}")) for n in range(6)]
    await _settle()
    assert [put.done() for put in puts] == [True] * 4 + [False] * 2
    assert [(wait.member, "room for record 'g4/0/0'" in wait.waits_for) for wait in table.waits()] == [
        ("p4", True),
        ("p5", False),
    ]
    trained: list[str] = []
    for step in range(3):
        lease = await table.take(step, _oldest(2))
        trained.extend(lease.items)
        table.commit(step, lease.token)
        await _settle()
    assert trained == [f"g{n}" for n in range(6)]
    assert all(put.result().status is PutStatus.STORED for put in puts)
    assert table.waits() == []


async def test_silent_eviction_a_cancelled_put_leaks_no_place(header: MakeHeader) -> None:
    table = AsyncTable(Table("train", capacity_records=1))
    await table.put(header("a"), b"x")
    waiting = asyncio.create_task(table.put(header("b"), b"x"))
    behind = asyncio.create_task(table.put(header("c"), b"x"))
    await _settle()
    waiting.cancel()
    lease = await table.take(0, _all)
    table.commit(0, lease.token)
    assert (await behind).status is PutStatus.STORED
    assert table.table.record("b/0/0") is None and table.waits() == []


async def test_a_place_given_up_lets_a_smaller_group_pass(header: MakeHeader) -> None:
    table = AsyncTable(Table("train", capacity_records=4))
    for n in range(3):
        await table.put(header(f"g{n}"), b"x")
    big = asyncio.create_task(table.put(header("big", size=2), b"x"))
    await _settle()
    small = asyncio.create_task(table.put(header("small"), b"x"))
    await _settle()
    assert not small.done(), "nobody overtakes"
    big.cancel()
    assert (await small).status is PutStatus.STORED


async def test_records_of_a_begun_group_overtake_the_line(header: MakeHeader) -> None:
    table = AsyncTable(Table("train", capacity_records=2))
    await table.put(header("a", 0, size=2), b"x")
    line = [asyncio.create_task(table.put(header("b", index, size=2), b"x")) for index in range(2)]
    await _settle()
    assert (await table.put(header("a", 1, size=2), b"x")).status is PutStatus.STORED
    lease = await table.take(0, _all)
    table.commit(0, lease.token)
    assert [verdict.status for verdict in await asyncio.gather(*line)] == [PutStatus.STORED] * 2


async def test_a_put_reaches_its_deadline_with_a_reason(header: MakeHeader) -> None:
    table = AsyncTable(Table("train", capacity_records=1))
    await table.put(header("a"), b"x")
    with pytest.raises(DeadlineError, match=r"p1 waited 0.01 s for room .*1 of 1 records"):
        await table.put(header("b"), b"x", who="p1", deadline_s=0.01)
    assert table.waits() == []


async def test_dropping_a_group_makes_room(header: MakeHeader) -> None:
    table = AsyncTable(Table("train", capacity_records=1))
    await table.put(header("a"), b"x")
    waiting = asyncio.create_task(table.put(header("b"), b"x"))
    await _settle()
    table.drop_group("a")
    assert (await waiting).status is PutStatus.STORED


async def test_wait_ready_wakes_with_the_last_missing_record(header: MakeHeader) -> None:
    table = AsyncTable(Table("train"))
    waiting = asyncio.create_task(table.wait_ready(2))
    for group in "ab":
        await table.put(header(group, 0, size=2), b"x")
        await table.put(header(group, 1, size=2), b"x")
        await _settle()
        assert waiting.done() is (group == "b")


async def test_sample_never_hangs_the_error_names_the_missing_groups(header: MakeHeader) -> None:
    lost = ["group 'g7' is running on worker w3, which is lost"]
    table = AsyncTable(Table("train", required_columns=("reward",)), describe_missing=lambda: lost)
    await table.put(header("g5", 0, size=2), b"x")
    await table.put(header("g6"), b"x")
    with pytest.raises(DeadlineError) as caught:
        await table.take(0, _oldest(8), deadline_s=0.01)
    message = str(caught.value)
    assert "learner (incarnation 0) waited 0.01 s for the batch of step 0" in message
    assert "group 'g5' attempt 0 has 1 of 2 records, sample 1 is missing" in message
    assert "group 'g6' attempt 0 waits for reward" in message
    assert lost[0] in message
    assert table.waits() == []


async def test_all_ranks_of_a_step_wait_for_and_get_one_lease(header: MakeHeader) -> None:
    table = AsyncTable(Table("train"))
    ranks = [asyncio.create_task(table.take(0, _all)) for _ in range(4)]
    await _settle()
    assert len(table.waits()) == 4
    await table.put(header("a"), b"x")
    leases = await asyncio.gather(*ranks)
    assert len({lease.token for lease in leases}) == 1


async def test_a_cancelled_take_leases_nothing(header: MakeHeader) -> None:
    table = AsyncTable(Table("train"))
    taking = asyncio.create_task(table.take(0, _all))
    await _settle()
    taking.cancel()
    await table.put(header("a"), b"x")
    await _settle()
    assert table.leases.live == () and table.table.num_ready == 1 and table.waits() == []


async def test_a_newer_incarnation_ends_the_wait_of_the_older(header: MakeHeader) -> None:
    table = AsyncTable(Table("train"))
    zombie = asyncio.create_task(table.take(0, _all, incarnation=1))
    await _settle()
    successor = asyncio.create_task(table.take(0, _all, incarnation=2))
    await _settle()
    await table.put(header("a"), b"x")
    assert (await successor).incarnation == 2
    with pytest.raises(FencedError, match="incarnation 1"):
        await zombie


async def test_the_records_of_a_dead_incarnation_are_taken_again_exactly_once(header: MakeHeader) -> None:
    table = AsyncTable(Table("train"))
    await table.put(header("a"), b"x")
    dead = await table.take(0, _all, incarnation=1)
    table.consumer_lost("learner", 1)
    lease = await table.take(0, _all, incarnation=2)
    assert lease.items == ("a",)
    with pytest.raises(FencedError):
        table.commit(0, dead.token)
    assert table.commit(0, lease.token).first
    assert not table.commit(0, lease.token).first
    assert table.stats().num_freed == 1


async def test_choosing_what_is_not_ready_is_an_error_and_leases_nothing(header: MakeHeader) -> None:
    table = AsyncTable(Table("train"))
    await table.put(header("a"), b"x")
    for chosen in (["b"], [], ["a", "a"]):
        with pytest.raises(UsageError):
            await table.take(0, lambda ready, chosen=chosen: chosen)
        assert table.leases.live == () and table.table.num_ready == 1


async def test_lag_at_consumption_a_stale_group_is_never_taken_and_no_short_batch_returned(
    header: MakeHeader,
) -> None:
    step, bound = 13, 2
    table = AsyncTable(Table("train"))
    table.leases = type(table.leases)(first_step=step)
    dropped: list[str] = []

    def choose(ready: list[ReadyGroup]) -> list[str] | None:
        fresh = [group.group_id for group in ready if step - group.oldest_version.version <= bound]
        dropped.extend(group.group_id for group in ready if group.group_id not in fresh)
        return fresh[:2] if len(fresh) >= 2 else None

    await table.put(header("early", version=10), b"x")
    await table.put(header("pushed", version=12), b"x")
    taking = asyncio.create_task(table.take(step, choose))
    await _settle()
    assert not taking.done(), "one fresh group is not a batch of two"
    for group in set(dropped):
        table.drop_group(group, "stale in queue")
    await table.put(header("fresh", version=11), b"x")
    assert (await taking).items == ("pushed", "fresh")
    assert set(dropped) == {"early"} and table.stats().num_dropped == 1


async def test_a_changed_rule_is_asked_again(header: MakeHeader) -> None:
    table = AsyncTable(Table("train"))
    await table.put(header("a"), b"x")
    gate = asyncio.Event()
    taking = asyncio.create_task(table.take(0, lambda ready: _all(ready) if gate.is_set() else None))
    await _settle()
    gate.set()
    table.changed()
    assert (await taking).items == ("a",)


async def test_a_rewind_replays_committed_batches_to_the_new_incarnation(header: MakeHeader) -> None:
    table = AsyncTable(Table("train"))
    table.leases.hold_for_checkpoints()
    for step, group in enumerate("abc"):
        await table.put(header(group), b"x")
        lease = await table.take(step, _all)
        table.commit(step, lease.token)
    table.checkpoint_covers(0)
    assert (table.stats().num_held, table.stats().num_freed) == (2, 1)
    await table.put(header("d"), b"x")
    table.rewind(1)
    replayed = [await table.take(step, _all, incarnation=1) for step in (1, 2)]
    assert [lease.items for lease in replayed] == [("b",), ("c",)]
    table.release(2, replayed[1].token)
    assert [group.group_id for group in table.table.ready_groups()] == ["d"]
    replayed[1] = await table.take(2, _all, incarnation=1)
    for step, lease in zip((1, 2), replayed, strict=True):
        table.commit(step, lease.token)
    table.checkpoint_covers(2)
    assert table.stats().num_freed == 3


async def test_steady_memory_thousands_of_puts_and_takes_leave_nothing(header: MakeHeader) -> None:
    table = AsyncTable(Table("train", capacity_records=64, remember_groups=100))
    for step in range(500):
        for n in range(8):
            await table.put(header(f"g{step}-{n}"), b"x" * 100)
        if step % 7 == 0:
            table.drop_group(f"g{step}-0")
        lease = await table.take(step, _all)
        if step % 5 == 0:
            table.release(step, lease.token)
            lease = await table.take(step, _all)
        table.commit(step, lease.token)
    stats = table.stats()
    assert (stats.num_records, stats.num_bytes, stats.reserved_records, stats.reserved_bytes) == (0, 0, 0, 0)
    assert table.waits() == [] and table.leases.live == () and table.leases.held == {}
    assert list(table.table.missing("reward")) == []
