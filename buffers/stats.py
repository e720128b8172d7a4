"""What a table says of itself."""

from dataclasses import dataclass, fields

from headrace.buffers.groups import PutStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStats:
    """A table at one moment. Counters start at 0 with the table and only grow; they count records.

    Attributes:
        num_records: Stored now, leased and held ones included.
        num_groups: Groups with at least one record stored now.
        num_ready: Groups that could be taken now.
        num_leased: Records leased to a consumer now.
        num_held: Records that are committed and wait for a checkpoint now.
        num_bytes: Bytes of stored records and columns now.
        reserved_records: What counts against the capacity: stored records, and places for those of begun groups.
        reserved_bytes: The same in bytes; the records still to come count as much as the first of their group.
        num_added: Accepted.
        num_duplicates: Put again and not stored again.
        num_refused: Refused for good (unknown attempt, dropped group, malformed header).
        num_full: Answers "full", each try counted.
        num_superseded: Removed because a newer attempt at their group began.
        num_dropped: Removed because their group was dropped.
        num_evicted: Removed by the eviction policy.
        num_evicted_groups: Groups removed by the eviction policy.
        num_sampled: Leased, each lease counted.
        num_freed: Removed because they were trained on and nothing holds them.
        eviction_policy: Name of the remover.
    """

    num_records: int
    num_groups: int
    num_ready: int
    num_leased: int
    num_held: int
    num_bytes: int
    reserved_records: int
    reserved_bytes: int
    num_added: int
    num_duplicates: int
    num_refused: int
    num_full: int
    num_superseded: int
    num_dropped: int
    num_evicted: int
    num_evicted_groups: int
    num_sampled: int
    num_freed: int
    eviction_policy: str


@dataclass(slots=True)
class Counters:
    """The counters of `TableStats` while they run."""

    num_added: int = 0
    num_duplicates: int = 0
    num_refused: int = 0
    num_full: int = 0
    num_superseded: int = 0
    num_dropped: int = 0
    num_evicted: int = 0
    num_evicted_groups: int = 0
    num_sampled: int = 0
    num_freed: int = 0

    def count(self, status: PutStatus) -> None:
        """Count one answer to a put."""
        match status:
            case PutStatus.STORED:
                self.num_added += 1
            case PutStatus.DUPLICATE:
                self.num_duplicates += 1
            case PutStatus.FULL:
                self.num_full += 1
            case PutStatus.REFUSED:
                self.num_refused += 1

    def as_dict(self) -> dict[str, int]:
        """All counters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
