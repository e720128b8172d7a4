"""The groups and records of a table and the orders they are found in. No rules: those are the table's.

Invariants:
    * `records` holds exactly the records of all groups.
    * `ready` holds exactly the waiting, complete groups that lack no required column, in the order they became so.
    * `lacking[column]`, for each watched column, holds exactly the records of waiting groups without that column.
"""

from collections.abc import Collection, Iterable, Iterator

from headrace.buffers.groups import Group, GroupState, ReadyGroup, StoredRecord
from headrace.buffers.room import Room
from headrace.engine.types.records import RecordHeader


class GroupIndex:
    """Where each group and record is.

    Args:
        required_columns: What each record of a ready group has.
        room: Told of everything that comes and goes.
    """

    def __init__(self, required_columns: frozenset[str], room: Room) -> None:
        self.groups: dict[str, Group] = {}
        self.records: dict[str, StoredRecord] = {}
        self.ready: dict[str, ReadyGroup] = {}
        self._required = required_columns
        self._room = room
        self._lacking: dict[str, dict[str, None]] = {column: {} for column in required_columns}
        self._in_state = dict.fromkeys(GroupState, 0)
        self._sequence = 0

    def num_in(self, state: GroupState) -> int:
        """Records of groups in a state."""
        return self._in_state[state]

    def waiting(self) -> Iterator[Group]:
        """Groups that nobody has leased or committed, oldest first."""
        return (group for group in self.groups.values() if group.state is GroupState.WAITING)

    def lacking(self, column: str) -> Collection[str]:
        """Records of waiting groups without a column, oldest first; the column is watched from now on."""
        records = self._lacking.get(column)
        if records is None:
            records = self._lacking[column] = {}
            for group in self.waiting():
                self._watch(group, (column,))
        return records

    def begin(self, header: RecordHeader, num_bytes: int) -> Group:
        """A group whose first record is about to come."""
        group = Group(header.group_id, header.group_size, header.attempt, self._next())
        self._room.begin(group, num_bytes)
        self.groups[group.group_id] = group
        return group

    def add(self, group: Group, header: RecordHeader, data: bytes) -> None:
        """Add a record to a waiting group."""
        record = StoredRecord(header, data)
        group.records[header.sample_index] = record
        group.lacking += len(self._required)
        self.records[header.record_id] = record
        self._in_state[group.state] += 1
        for lacking in self._lacking.values():
            lacking[header.record_id] = None
        self._room.add(group, len(data))
        self._note_ready(group)

    def add_column(self, record: StoredRecord, name: str, data: bytes) -> None:
        """Add a column that the record does not have."""
        group = self.groups[record.header.group_id]
        record.columns[name] = data
        self._room.add(group, len(data))
        if name in self._lacking:
            self._lacking[name].pop(record.header.record_id, None)
        if name in self._required:
            group.lacking -= 1
            self._note_ready(group)

    def move(self, group: Group, state: GroupState) -> None:
        """Change a group's state, and with it the orders that it is found in."""
        if group.state is state:
            return
        self._in_state[group.state] -= len(group.records)
        self._in_state[state] += len(group.records)
        group.state = state
        if state is GroupState.WAITING:
            self._watch(group, self._lacking)
            self._note_ready(group)
        else:
            self._forget(group)

    def remove(self, group: Group) -> int:
        """Take a group out. Returns how many records went with it."""
        self._forget(group)
        self._in_state[group.state] -= len(group.records)
        for record in group.records.values():
            del self.records[record.header.record_id]
        del self.groups[group.group_id]
        self._room.end(group)
        return len(group.records)

    def _note_ready(self, group: Group) -> None:
        whole = group.complete and group.lacking == 0 and group.state is GroupState.WAITING
        if whole and group.group_id not in self.ready:
            group.completed = self._next()
            self.ready[group.group_id] = ReadyGroup.of(group)

    def _watch(self, group: Group, columns: Iterable[str]) -> None:
        for column in columns:
            for record in group.in_order():
                if column not in record.columns:
                    self._lacking[column][record.header.record_id] = None

    def _forget(self, group: Group) -> None:
        self.ready.pop(group.group_id, None)
        for lacking in self._lacking.values():
            for record in group.records.values():
                lacking.pop(record.header.record_id, None)

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence
