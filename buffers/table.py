"""The table: records of whole groups in memory, and what may be done with them. Synchronous, single-threaded, no clock.

Invariants:
    * A record is stored once, whatever is sent again: by record id while it is here, and by group and attempt for as
      long as the ends of groups are remembered.
    * Records of at most one attempt at a group are here. A newer attempt removes the older one, unless that is leased.
    * A group is ready when all `group_size` records of its attempt and all required columns are there. Only whole
      groups are taken, dropped, evicted and freed.
    * A column of a record is written once; the same bytes again change nothing, other bytes are refused.
    * Room is reserved for whole groups (see `room.py`): begun groups cannot block each other.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from headrace.buffers.groups import (
    STORED,
    Group,
    GroupState,
    PutStatus,
    PutVerdict,
    ReadyGroup,
    StoredRecord,
)
from headrace.buffers.index import GroupIndex
from headrace.buffers.intake import judge_column, judge_record, refused
from headrace.buffers.past import PastGroups
from headrace.buffers.removers import NoRemover, Remover
from headrace.buffers.room import Room
from headrace.buffers.stats import Counters, TableStats
from headrace.engine.errors import UsageError
from headrace.engine.records import DEFAULT_SCHEMA, TableSchema
from headrace.engine.types.records import RecordHeader


class Table:
    """Records of one table.

    Args:
        name: How clients call it.
        required_columns: Columns that every record of a group must have before the group can be taken.
        schema: Columns that the table knows.
        capacity_records: Most records, leased and held ones included.
        capacity_bytes: Most bytes of records and columns.
        remover: What happens when it is full.
        remember_groups: How many ended groups are remembered, so that what is sent again is known.

    Raises:
        SchemaError: A required column is not in the schema.
        ConfigError: A capacity is not positive.
    """

    def __init__(
        self,
        name: str,
        *,
        required_columns: Collection[str] = (),
        schema: TableSchema = DEFAULT_SCHEMA,
        capacity_records: int = 65_536,
        capacity_bytes: int = 1 << 30,
        remover: Remover | None = None,
        remember_groups: int = 16_384,
    ) -> None:
        for column in required_columns:
            schema.spec(column)
        self.name = name
        self.schema = schema
        self.required_columns = frozenset(required_columns)
        self._room = Room(capacity_records, capacity_bytes)
        self._remover: Remover = remover or NoRemover()
        self._index = GroupIndex(self.required_columns, self._room)
        self._past = PastGroups(remember_groups)
        self._counters = Counters()

    # Putting

    def put(self, header: RecordHeader, data: bytes, *, may_begin: bool = True) -> PutVerdict:
        """Store a record, or say why not. Never waits.

        Args:
            header: What the index goes by.
            data: The encoded record; kept, not looked into.
            may_begin: False answers FULL to a record whose group would have to begin, because others wait in line.
        """
        verdict = judge_record(header, self._index, self._past) or self._store(header, data, may_begin)
        self._counters.count(verdict.status)
        return verdict

    def add_column(self, record_id: str, name: str, data: bytes) -> PutVerdict:
        """Add a sidecar column to a stored record. The same bytes again are a duplicate, other bytes are refused."""
        record = self._index.records.get(record_id)
        if record is None:
            return refused(f"there is no record {record_id!r} in table {self.name!r}")
        verdict = judge_column(record, name, data, self.schema)
        if verdict is not None:
            return verdict
        self._index.add_column(record, name, data)
        return STORED

    # Asking

    def ready_groups(self, required: Collection[str] | None = None) -> list[ReadyGroup]:
        """Whole groups that nobody has leased, in the order they became ready.

        Args:
            required: Other columns than the table's own; None asks for those, without a scan.
        """
        if required is None or frozenset(required) == self.required_columns:
            return list(self._index.ready.values())
        wanted = set(required)
        return [
            ReadyGroup.of(group)
            for group in self._index.waiting()
            if group.complete and all(wanted <= record.columns.keys() for record in group.records.values())
        ]

    @property
    def num_ready(self) -> int:
        """How many groups could be taken now."""
        return len(self._index.ready)

    def records_of(self, group_id: str) -> tuple[StoredRecord, ...]:
        """The records of a group by sample index.

        Raises:
            UsageError: The group is not here.
        """
        return self._group(group_id).in_order()

    def record(self, record_id: str) -> StoredRecord | None:
        """One record, or None when it is not here."""
        return self._index.records.get(record_id)

    def missing(self, column: str) -> Iterator[str]:
        """Ids of records in waiting groups that lack a column, oldest first. The table may change between steps.

        Raises:
            SchemaError: The table does not know the column.
        """
        self.schema.spec(column)
        return iter(tuple(self._index.lacking(column)))

    def unfinished(self) -> Iterator[str]:
        """One sentence for each group that is here and not ready: which samples or columns it waits for."""
        for group in self._index.waiting():
            if not group.complete:
                samples = [str(index) for index in range(group.size) if index not in group.records]
                yield (
                    f"group {group.group_id!r} attempt {group.attempt} has {len(group.records)} of {group.size} "
                    f"records, sample {', '.join(samples)} is missing"
                )
            elif group.lacking:
                columns = sorted(
                    column
                    for column in self.required_columns
                    if any(column not in record.columns for record in group.records.values())
                )
                yield f"group {group.group_id!r} attempt {group.attempt} waits for {', '.join(columns)}"

    def stats(self) -> TableStats:
        """A snapshot."""
        return TableStats(
            num_records=len(self._index.records),
            num_groups=len(self._index.groups),
            num_ready=len(self._index.ready),
            num_leased=self._index.num_in(GroupState.LEASED),
            num_held=self._index.num_in(GroupState.HELD),
            num_bytes=self._room.stored_bytes,
            reserved_records=self._room.records,
            reserved_bytes=self._room.bytes,
            eviction_policy=self._remover.name,
            **self._counters.as_dict(),
        )

    # Moving whole groups

    def set_priority(self, group_id: str, priority: float) -> None:
        """Give a group a priority, for the prioritized sampler.

        Raises:
            UsageError: The group is not here.
        """
        self._group(group_id).priority = priority
        ready = self._index.ready.get(group_id)
        if ready is not None:
            self._index.ready[group_id] = replace(ready, priority=priority)

    def drop_group(self, group_id: str, reason: str = "dropped", attempt: int = 0) -> bool:
        """End a group: its records go, and late ones of any attempt up to `attempt` or the one here are refused.

        Returns:
            False when no record of it was here.

        Raises:
            UsageError: The group is leased or held.
        """
        group = self._index.groups.get(group_id)
        last = max(attempt, self._past.last_attempt(group_id))
        if group is not None:
            self._refuse_unless_waiting(group)
            last = max(last, group.attempt)
            self._counters.num_dropped += self._index.remove(group)
        self._past.dropped(group_id, last, reason)
        return group is not None

    def requeue(self, group_id: str, attempt: int) -> None:
        """A new attempt at a group begins: records of older attempts go, and late ones are refused.

        Raises:
            UsageError: The group is leased or held.
        """
        group = self._index.groups.get(group_id)
        if group is not None and group.attempt < attempt:
            self._refuse_unless_waiting(group)
            self._counters.num_superseded += self._index.remove(group)
        self._past.dropped(group_id, attempt - 1, f"attempt {attempt} has begun")

    def lease(self, group_ids: Iterable[str]) -> None:
        """Take groups out of what is ready (or, for a replayed batch, out of what is held).

        Raises:
            UsageError: A group is not here, or not ready. Nothing is taken then.
        """
        groups = [self._group(group_id) for group_id in group_ids]
        for group in groups:
            if group.state is GroupState.WAITING and group.group_id not in self._index.ready:
                raise UsageError(f"group {group.group_id!r} of table {self.name!r} is not ready and cannot be taken")
        for group in groups:
            self._index.move(group, GroupState.LEASED)
            self._counters.num_sampled += group.size

    def give_back(self, group_ids: Iterable[str]) -> None:
        """Leased groups are ready again."""
        for group_id in group_ids:
            self._index.move(self._group(group_id), GroupState.WAITING)

    def hold(self, group_ids: Iterable[str]) -> None:
        """Leased groups are committed and stay until a checkpoint covers them."""
        for group_id in group_ids:
            self._index.move(self._group(group_id), GroupState.HELD)

    def free(self, group_ids: Iterable[str]) -> None:
        """Trained groups go; what is sent of them again is a duplicate."""
        for group_id in group_ids:
            group = self._group(group_id)
            self._past.trained(group_id, group.attempt)
            self._counters.num_freed += self._index.remove(group)

    # Inner workings

    def _store(self, header: RecordHeader, data: bytes, may_begin: bool) -> PutVerdict:
        impossible = self._room.never_fits(header.group_size, len(data))
        if impossible:
            return refused(f"record {header.record_id!r} can never be stored: {impossible}")
        group = self._index.groups.get(header.group_id)
        if group is not None and group.attempt < header.attempt:
            self._counters.num_superseded += self._index.remove(group)
            group = None
        if group is None:
            if not may_begin or not self._make_room(header, len(data)):
                return PutVerdict(PutStatus.FULL, self._full())
            group = self._index.begin(header, len(data))
        self._index.add(group, header, data)
        return STORED

    def _make_room(self, header: RecordHeader, num_bytes: int) -> bool:
        while not self._room.fits(header.group_size, num_bytes):
            victim = self._remover.victim(self._index.waiting())
            if victim is None:
                return False
            group = self._group(victim)
            self._past.dropped(victim, group.attempt, f"evicted (policy {self._remover.name!r})")
            self._counters.num_evicted += self._index.remove(group)
            self._counters.num_evicted_groups += 1
        return True

    def _full(self) -> str:
        held = self._index.num_in(GroupState.HELD)
        return (
            f"table {self.name!r} is full: {self._room.records} of {self._room.capacity_records} records and "
            f"{self._room.bytes} of {self._room.capacity_bytes} bytes are taken or reserved"
            + (f"; {held} records are held until a checkpoint covers their step" if held else "")
        )

    def _group(self, group_id: str) -> Group:
        group = self._index.groups.get(group_id)
        if group is None:
            raise UsageError(f"there is no group {group_id!r} in table {self.name!r}")
        return group

    def _refuse_unless_waiting(self, group: Group) -> None:
        if group.state is not GroupState.WAITING:
            raise UsageError(
                f"group {group.group_id!r} of table {self.name!r} is {group.state.value} for a step and cannot be "
                f"removed; release or commit the step first"
            )
