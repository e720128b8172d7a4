"""The table's counts and orders after any history of calls, against the records themselves."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.buffers.groups import StoredRecord
from headrace.buffers.table import Table
from headrace.engine.errors import UsageError
from headrace.engine.records import encode_column
from headrace.engine.types import PolicyVersion
from headrace.engine.types.records import RecordHeader


def _reward(value: float) -> bytes:
    return encode_column("reward", np.array(value, np.float64))


Step = st.tuples(
    st.sampled_from(["put", "column", "lease", "back", "hold", "free", "drop", "requeue"]), st.integers(0, 3)
)


@settings(max_examples=150, deadline=None)
@given(st.lists(Step, max_size=60))
def test_counts_and_orders_agree_with_the_records_after_any_history(
    steps: list[tuple[str, int]],
) -> None:
    table = Table("train", required_columns=("reward",), capacity_records=6, capacity_bytes=60)
    attempts = dict.fromkeys("abcd", 0)
    for action, number in steps:
        group = "abcd"[number]
        records = {stored.header.sample_index: stored for stored in _records(table, group)}
        index = min(set(range(2)) - records.keys(), default=0)
        try:
            if action == "put":
                table.put(_header(group, index, attempts[group]), bytes(5 + number))
            elif action == "column" and records:
                table.add_column(records[min(records)].header.record_id, "reward", _reward(1.0))
                table.add_column(records[max(records)].header.record_id, "reward", _reward(1.0))
            elif action == "lease":
                table.lease([group])
            elif action in ("back", "hold", "free"):
                if table.stats().num_leased == 0 or group in {ready.group_id for ready in table.ready_groups()}:
                    continue
                if len(records) == 2 and all(record.columns for record in records.values()):
                    {"back": table.give_back, "hold": table.hold, "free": table.free}[action]([group])
            elif action == "drop":
                table.drop_group(group, attempt=attempts[group])
            else:
                table.requeue(group, attempts[group] + 1)
                attempts[group] += 1
        except UsageError:
            pass
        _check(table)


def _header(group: str, index: int, attempt: int) -> RecordHeader:
    version = PolicyVersion(0, 0)
    return RecordHeader(
        record_id=f"{group}/{index}/{attempt}",
        group_id=group,
        sample_index=index,
        attempt=attempt,
        group_size=2,
        oldest_version=version,
        newest_version=version,
        num_prompt_tokens=1,
        num_response_tokens=1,
        num_loss_tokens=1,
        mean_version=0.0,
    )


def _records(table: Table, group: str) -> list[StoredRecord]:
    try:
        return list(table.records_of(group))
    except UsageError:
        return []


def _check(table: Table) -> None:
    stats = table.stats()
    groups = {group: records for group in "abcd" if (records := _records(table, group))}
    everything = [record for records in groups.values() for record in records]
    assert stats.num_records == len(everything) and stats.num_groups == len(groups)
    assert stats.num_bytes == sum(len(r.data) + sum(map(len, r.columns.values())) for r in everything)
    assert stats.reserved_records == 2 * len(groups) <= 6
    assert stats.reserved_bytes >= stats.num_bytes
    gone = stats.num_superseded + stats.num_dropped + stats.num_evicted + stats.num_freed
    assert stats.num_added == stats.num_records + gone
    for ready in table.ready_groups():
        assert len(groups[ready.group_id]) == 2
        assert all("reward" in record.columns for record in groups[ready.group_id])
    assert all("reward" not in table.record(record_id).columns for record_id in table.missing("reward"))
