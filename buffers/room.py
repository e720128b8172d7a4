"""How much of a table's capacity is taken. Pure arithmetic, kept apart so that it can be tested by itself.

Invariants:
    * A group that was let in can always be completed: places for all its records are reserved with the first one, so
      that begun groups can never fill a table without any of them becoming whole.
    * The sum of the reservations is what counts against the capacity. In records it never exceeds it. In bytes the
      records still to come are guessed to be as large as the first; larger ones may exceed the capacity by the
      difference, within groups that were already begun.
"""

from headrace.buffers.groups import Group
from headrace.engine.errors import ConfigError


class Room:
    """The capacity of one table in records and bytes, and what is reserved of it.

    Attributes:
        records, bytes: Reserved now.
        stored_bytes: Really there now.
    """

    def __init__(self, capacity_records: int, capacity_bytes: int) -> None:
        if capacity_records < 1 or capacity_bytes < 1:
            raise ConfigError(
                f"a table needs room for at least one record and one byte, got capacity_records = {capacity_records} "
                f"and capacity_bytes = {capacity_bytes}"
            )
        self.capacity_records = capacity_records
        self.capacity_bytes = capacity_bytes
        self.records = 0
        self.bytes = 0
        self.stored_bytes = 0

    def never_fits(self, group_size: int, num_bytes: int) -> str:
        """Why a record of such a group can never be stored; empty when it can."""
        if group_size > self.capacity_records:
            return (
                f"its group has {group_size} records and the table has room for {self.capacity_records}; "
                f"raise buffer.capacity_records to at least {group_size}"
            )
        if num_bytes > self.capacity_bytes:
            return (
                f"it has {num_bytes} bytes and the table has room for {self.capacity_bytes}; "
                f"raise buffer.capacity_bytes to at least {num_bytes * group_size}"
            )
        return ""

    def fits(self, group_size: int, num_bytes: int) -> bool:
        """Whether a group with a first record of `num_bytes` can begin now. An empty table takes any that could fit."""
        if self.records + group_size > self.capacity_records:
            return False
        return self.records == 0 or self.bytes + num_bytes * group_size <= self.capacity_bytes

    def begin(self, group: Group, num_bytes: int) -> None:
        """Reserve a group's room by its first record."""
        self.records += group.size
        group.reserved_bytes = num_bytes * group.size
        self.bytes += group.reserved_bytes

    def add(self, group: Group, num_bytes: int) -> None:
        """Count bytes that were added to a group."""
        self.stored_bytes += num_bytes
        group.num_bytes += num_bytes
        self._settle(group, group.num_bytes if group.complete else max(group.num_bytes, group.reserved_bytes))

    def end(self, group: Group) -> None:
        """Give a group's room back."""
        self.records -= group.size
        self.stored_bytes -= group.num_bytes
        self._settle(group, 0)

    def _settle(self, group: Group, reserved_bytes: int) -> None:
        self.bytes += reserved_bytes - group.reserved_bytes
        group.reserved_bytes = reserved_bytes
