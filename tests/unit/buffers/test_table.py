"""The table: what it accepts, when a group is whole, what a full table does."""

from collections.abc import Callable

import numpy as np
import pytest

from headrace.buffers.groups import PutStatus
from headrace.buffers.removers import OldestRemover, remover_named
from headrace.buffers.table import Table
from headrace.engine.errors import ConfigError, SchemaError, UsageError
from headrace.engine.records import encode_column
from headrace.engine.types import PolicyVersion
from headrace.engine.types.records import RecordHeader

MakeHeader = Callable[..., RecordHeader]


def _reward(value: float) -> bytes:
    return encode_column("reward", np.array(value, np.float64))


def test_a_record_sent_twice_is_stored_once(header: MakeHeader) -> None:
    table = Table("train")
    assert table.put(header("g", 0, size=2), b"a").status is PutStatus.STORED
    assert table.put(header("g", 0, size=2), b"a").status is PutStatus.DUPLICATE
    assert (table.stats().num_records, table.stats().num_duplicates) == (1, 1)


def test_a_trained_group_sent_again_is_a_duplicate_and_not_a_new_group(header: MakeHeader) -> None:
    table = Table("train")
    table.put(header("g"), b"a")
    table.lease(["g"])
    table.free(["g"])
    assert table.put(header("g"), b"a").status is PutStatus.DUPLICATE
    assert table.stats().num_groups == 0


def test_a_group_is_ready_when_all_its_records_are_there(header: MakeHeader) -> None:
    table = Table("train")
    table.put(header("g", 1, size=2, version=3, tokens=5), b"b")
    assert table.ready_groups() == []
    assert list(table.unfinished()) == ["group 'g' attempt 0 has 1 of 2 records, sample 0 is missing"]
    table.put(header("g", 0, size=2, version=4, tokens=15), b"a")
    (ready,) = table.ready_groups()
    assert (ready.oldest_version, ready.newest_version) == (PolicyVersion(0, 3), PolicyVersion(0, 4))
    assert ready.mean_version == pytest.approx((3 * 5 + 4 * 15) / 20)
    assert (ready.num_tokens, ready.num_records) == (40, 2)
    assert [record.data for record in table.records_of("g")] == [b"a", b"b"]


def test_a_group_waits_for_the_required_columns(header: MakeHeader) -> None:
    table = Table("train", required_columns=("reward",))
    for index in range(2):
        table.put(header("g", index, size=2), b"x")
    assert list(table.missing("reward")) == ["g/0/0", "g/1/0"]
    assert list(table.unfinished()) == ["group 'g' attempt 0 waits for reward"]
    table.add_column("g/1/0", "reward", _reward(1.0))
    assert (list(table.missing("reward")), table.num_ready) == (["g/0/0"], 0)
    table.add_column("g/0/0", "reward", _reward(0.0))
    assert (list(table.missing("reward")), table.num_ready) == ([], 1)
    assert table.ready_groups(["values"]) == []
    assert list(table.missing("values")) == ["g/0/0", "g/1/0"]


def test_a_column_is_written_once(header: MakeHeader) -> None:
    table = Table("train", required_columns=("reward",))
    table.put(header("g"), b"x")
    assert table.add_column("g/0/0", "reward", _reward(1.0)).status is PutStatus.STORED
    assert table.add_column("g/0/0", "reward", _reward(1.0)).status is PutStatus.DUPLICATE
    other = table.add_column("g/0/0", "reward", _reward(2.0))
    assert other.status is PutStatus.REFUSED and "never change" in other.reason
    assert table.record("g/0/0").columns["reward"] == _reward(1.0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("record_id", "name", "data", "reason"),
    [
        ("h/0/0", "reward", _reward(1.0), "no record 'h/0/0'"),
        ("g/0/0", "score", encode_column("score", np.float64(1.0)[...]), "unknown"),
        ("g/0/0", "reward", encode_column("reward", np.zeros(10)), "shape"),
        ("g/0/0", "values", encode_column("values", np.zeros(9, np.float32)), "shape"),
        ("g/0/0", "values", _reward(1.0), "encoded as 'reward'"),
        ("g/0/0", "reward", _reward(1.0)[:-1], "column 'reward' of record 'g/0/0'"),
        ("g/0/0", "reward", b"", "column 'reward' of record 'g/0/0'"),
    ],
)
def test_a_column_that_does_not_belong_is_refused(
    header: MakeHeader, record_id: str, name: str, data: bytes, reason: str
) -> None:
    table = Table("train")
    table.put(header("g"), b"x")
    verdict = table.add_column(record_id, name, data)
    assert verdict.status is PutStatus.REFUSED and reason in verdict.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"record_id": ""}, "empty"),
        ({"group_id": ""}, "empty"),
        ({"group_size": 0}, "group of 0"),
        ({"sample_index": 2, "record_id": "g/2/0"}, "sample_index 2"),
        ({"record_id": "g/x/0", "group_size": 3}, "names 3 samples"),
        ({"record_id": "g/x/0"}, "already here as 'g/0/0'"),
        ({"record_id": "g/1/0", "sample_index": 1, "num_prompt_tokens": -1}, "negative"),
        ({"group_id": "h"}, "taken by another group"),
        ({"record_id": "big/0/0", "group_id": "big", "group_size": 99}, "raise buffer.capacity_records"),
    ],
)
def test_a_record_that_contradicts_what_is_there_is_refused(
    header: MakeHeader, changes: dict[str, object], reason: str
) -> None:
    table = Table("train", capacity_records=8)
    table.put(header("g", 0, size=2), b"x")
    verdict = table.put(header("g", 0, size=2, **changes), b"x")
    assert verdict.status is PutStatus.REFUSED and reason in verdict.reason
    assert table.stats().num_records == 1


def test_a_new_attempt_removes_the_old_one_and_refuses_its_late_records(header: MakeHeader) -> None:
    table = Table("train")
    table.put(header("g", 0, size=2), b"old")
    table.requeue("g", 1)
    late = table.put(header("g", 1, size=2), b"old")
    assert late.status is PutStatus.REFUSED and "attempt 1 has begun" in late.reason
    for index in range(2):
        assert table.put(header("g", index, size=2, attempt=1), b"new").accepted
    assert [record.data for record in table.records_of("g")] == [b"new", b"new"]
    assert table.stats().num_superseded == 1


def test_a_newer_attempt_supersedes_without_being_announced(header: MakeHeader) -> None:
    table = Table("train")
    table.put(header("g", 0, size=2), b"old")
    table.put(header("g", 0, size=2, attempt=2), b"new")
    assert "attempt 2 has begun" in table.put(header("g", 1, size=2, attempt=1), b"old").reason
    assert table.stats().num_records == 1


def test_a_dropped_group_takes_no_late_records(header: MakeHeader) -> None:
    table = Table("train")
    table.put(header("g", 0, size=2), b"x")
    assert table.drop_group("g", "zero variance")
    late = table.put(header("g", 1, size=2), b"x")
    assert late.status is PutStatus.REFUSED and "zero variance" in late.reason
    assert not table.drop_group("h", attempt=3)
    assert table.put(header("h", attempt=3), b"x").status is PutStatus.REFUSED
    assert table.stats().reserved_records == 0


def test_leased_groups_are_neither_ready_nor_dropped_and_come_back_whole(header: MakeHeader) -> None:
    table = Table("train")
    for group in "ab":
        table.put(header(group), b"x")
    table.lease(["a"])
    assert [ready.group_id for ready in table.ready_groups()] == ["b"]
    with pytest.raises(UsageError, match="leased"):
        table.drop_group("a")
    with pytest.raises(UsageError, match="no group 'c'"):
        table.lease(["b", "c"])
    assert table.num_ready == 1
    table.give_back(["a"])
    assert sorted(ready.group_id for ready in table.ready_groups()) == ["a", "b"]


def test_held_groups_count_against_the_capacity_until_they_are_freed(header: MakeHeader) -> None:
    table = Table("train", capacity_records=1)
    table.put(header("a"), b"x")
    table.lease(["a"])
    table.hold(["a"])
    full = table.put(header("b"), b"x")
    assert full.status is PutStatus.FULL and "held until a checkpoint" in full.reason
    table.free(["a"])
    assert table.put(header("b"), b"x").accepted


@pytest.mark.parametrize("size", [1, 2])
def test_silent_eviction_a_full_table_pushes_back(header: MakeHeader, size: int) -> None:
    table = Table("train", capacity_records=4)
    verdicts = [table.put(header(f"g{n // size}", n % size, size=size), b"x").status for n in range(6)]
    assert verdicts == [PutStatus.STORED] * 4 + [PutStatus.FULL] * 2
    stats = table.stats()
    assert (stats.num_records, stats.num_full, stats.num_evicted, stats.eviction_policy) == (4, 2, 0, "none")


@pytest.mark.parametrize("size", [1, 2])
def test_silent_eviction_a_named_policy_counts_what_it_evicts(header: MakeHeader, size: int) -> None:
    table = Table("train", capacity_records=4, remover=OldestRemover())
    for n in range(6):
        assert table.put(header(f"g{n // size}", n % size, size=size), b"x").accepted
    stats = table.stats()
    assert (stats.num_records, stats.num_evicted, stats.num_evicted_groups) == (4, 2, 2 // size)
    assert stats.eviction_policy == "oldest"
    late = table.put(header("g0", 0, size=size), b"x")
    assert late.status is PutStatus.REFUSED and "evicted (policy 'oldest')" in late.reason


def test_eviction_spares_what_is_leased(header: MakeHeader) -> None:
    table = Table("train", capacity_records=2, remover=remover_named("oldest"))
    for group in "ab":
        table.put(header(group), b"x")
    table.lease(["a", "b"])
    assert table.put(header("c"), b"x").status is PutStatus.FULL
    table.give_back(["b"])
    assert table.put(header("c"), b"x").accepted
    assert table.stats().num_leased == 1


def test_begun_groups_cannot_block_each_other(header: MakeHeader) -> None:
    table = Table("train", capacity_records=4)
    assert table.put(header("a", 0, size=2), b"x").accepted
    assert table.put(header("b", 0, size=2), b"x").accepted
    assert table.put(header("c", 0, size=2), b"x").status is PutStatus.FULL
    assert table.put(header("a", 1, size=2), b"x").accepted
    assert table.put(header("b", 1, size=2), b"x").accepted
    assert table.num_ready == 2


def test_bytes_are_reserved_by_the_first_record_and_settled_by_the_last(header: MakeHeader) -> None:
    table = Table("train", capacity_bytes=100)
    table.put(header("a", 0, size=2), bytes(40))
    assert table.stats().reserved_bytes == 80
    assert table.put(header("b"), bytes(30)).status is PutStatus.FULL
    table.put(header("a", 1, size=2), bytes(10))
    assert (table.stats().reserved_bytes, table.stats().num_bytes) == (50, 50)
    assert table.put(header("b"), bytes(30)).accepted
    refused = table.put(header("c"), bytes(101))
    assert refused.status is PutStatus.REFUSED and "raise buffer.capacity_bytes" in refused.reason


def test_unknown_names_are_refused_at_once() -> None:
    with pytest.raises(SchemaError, match="reqard"):
        Table("train", required_columns=("reqard",))
    with pytest.raises(ConfigError, match="'newest'"):
        remover_named("newest")
    with pytest.raises(ConfigError, match="capacity_records = 0"):
        Table("train", capacity_records=0)


def test_the_memory_of_past_groups_is_bounded(header: MakeHeader) -> None:
    table = Table("train", remember_groups=10)
    for n in range(100):
        table.put(header(f"g{n}"), b"x")
        table.lease([f"g{n}"])
        table.free([f"g{n}"])
    assert table.put(header("g99"), b"x").status is PutStatus.DUPLICATE
    assert table.put(header("g0"), b"x").status is PutStatus.STORED
