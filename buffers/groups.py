"""Records and groups as a table keeps them, and what is told of a group to those who choose."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.engine.types import PolicyVersion
from headrace.engine.types.records import RecordHeader


class PutStatus(enum.Enum):
    """What became of a record or a column that was put."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    FULL = "full"
    REFUSED = "refused"


class PutVerdict(NamedTuple):
    """The answer to a put.

    Attributes:
        status: STORED; DUPLICATE, what was put had been stored before and counts once; FULL, try again when there is
            room; REFUSED, trying again is of no use.
        reason: One sentence, with FULL and REFUSED.
    """

    status: PutStatus
    reason: str = ""

    @property
    def accepted(self) -> bool:
        """The table has it, now or from before."""
        return self.status in (PutStatus.STORED, PutStatus.DUPLICATE)


STORED = PutVerdict(PutStatus.STORED)
DUPLICATE = PutVerdict(PutStatus.DUPLICATE)


class GroupState(enum.Enum):
    """Where a group is: WAITING for records, columns or a consumer; LEASED for a step; HELD for a checkpoint."""

    WAITING = "waiting"
    LEASED = "leased"
    HELD = "held"


@dataclass(slots=True)
class StoredRecord:
    """One record: header and encoded bytes never change, columns are only added."""

    header: RecordHeader
    data: bytes
    columns: dict[str, bytes] = field(default_factory=dict[str, bytes])


@dataclass(slots=True)
class Group:
    """Records of one attempt at one prompt group, by sample index.

    Attributes:
        inserted: Sequence number of its first record in the table.
        completed: Sequence number of the moment it became ready; -1 before.
        lacking: Required columns that records of this group do not have yet.
        num_bytes: Records and columns that are there.
        reserved_bytes: What the group counts for; until it is complete, room for the records still to come is in it.
    """

    group_id: str
    size: int
    attempt: int
    inserted: int
    records: dict[int, StoredRecord] = field(default_factory=dict[int, StoredRecord])
    state: GroupState = GroupState.WAITING
    completed: int = -1
    lacking: int = 0
    num_bytes: int = 0
    reserved_bytes: int = 0
    priority: float = 1.0

    @property
    def complete(self) -> bool:
        """All records of the attempt are there."""
        return len(self.records) == self.size

    def in_order(self) -> tuple[StoredRecord, ...]:
        """The records by sample index."""
        return tuple(self.records[index] for index in sorted(self.records))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyGroup:
    """A whole group with every required column, as those see it who choose the groups of a step.

    Attributes:
        oldest_version, newest_version: Over all tokens of the group.
        mean_version: Mean over the group's response tokens of the version counter.
        num_tokens: Prompt and response tokens of all its records.
        inserted: Sequence number of its first record; smaller is older.
        completed: Sequence number of the moment it became ready.
        priority: What `Table.set_priority` last said; 1.0 by default.
    """

    group_id: str
    attempt: int
    oldest_version: PolicyVersion
    newest_version: PolicyVersion
    mean_version: float
    num_tokens: int
    num_records: int
    inserted: int
    completed: int
    priority: float

    @classmethod
    def of(cls, group: Group) -> "ReadyGroup":
        """Sum a group up."""
        headers = [record.header for record in group.records.values()]
        response = sum(header.num_response_tokens for header in headers)
        weighted = sum(header.mean_version * header.num_response_tokens for header in headers)
        oldest = min(header.oldest_version for header in headers)
        return cls(
            group_id=group.group_id,
            attempt=group.attempt,
            oldest_version=oldest,
            newest_version=max(header.newest_version for header in headers),
            mean_version=weighted / response if response else float(oldest.version),
            num_tokens=response + sum(header.num_prompt_tokens for header in headers),
            num_records=len(headers),
            inserted=group.inserted,
            completed=group.completed,
            priority=group.priority,
        )


@dataclass(frozen=True, slots=True)
class GroupView:
    """Ready groups as parallel arrays in insertion order: the `TableView` that samplers choose from.

    Attributes:
        group_ids: M names.
        oldest_versions: int64 [M], version counter of each group's oldest token.
        inserted: int64 [M], insertion sequence number.
        completed: int64 [M], sequence number of the moment the group became ready.
        priorities: float64 [M].
    """

    group_ids: tuple[str, ...]
    oldest_versions: npt.NDArray[np.int64]
    inserted: npt.NDArray[np.int64]
    completed: npt.NDArray[np.int64]
    priorities: npt.NDArray[np.float64]

    @classmethod
    def of(cls, ready: Sequence[ReadyGroup]) -> "GroupView":
        """The view of some ready groups."""
        groups = sorted(ready, key=lambda group: group.inserted)
        return cls(
            tuple(group.group_id for group in groups),
            np.array([group.oldest_version.version for group in groups], np.int64),
            np.array([group.inserted for group in groups], np.int64),
            np.array([group.completed for group in groups], np.int64),
            np.array([group.priority for group in groups], np.float64),
        )
