"""What is remembered of groups that ended, so that their late and repeated records are known. Bounded."""

from dataclasses import dataclass

from headrace.buffers.groups import DUPLICATE, PutStatus, PutVerdict
from headrace.engine.types.records import RecordHeader


@dataclass(frozen=True, slots=True)
class _Past:
    attempt: int
    reason: str  # empty: trained on


class PastGroups:
    """The last attempt at each group that ended, and how.

    Args:
        limit: How many groups are remembered; the oldest end is forgotten first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._past: dict[str, _Past] = {}

    def __len__(self) -> int:
        return len(self._past)

    def trained(self, group_id: str, attempt: int) -> None:
        """The group was consumed; its records are known and not stored again."""
        self._note(group_id, _Past(attempt, ""))

    def dropped(self, group_id: str, attempt: int, reason: str) -> None:
        """Attempts up to this one ended for a reason; their records are refused."""
        self._note(group_id, _Past(attempt, reason))

    def last_attempt(self, group_id: str) -> int:
        """The last attempt that ended; 0 when the group is not known."""
        past = self._past.get(group_id)
        return 0 if past is None else past.attempt

    def verdict(self, header: RecordHeader, current_attempt: int | None) -> PutVerdict | None:
        """What to say to a record of a group that is not here, or is here at a newer attempt; None is a new record."""
        past = self._past.get(header.group_id)
        if past is not None and header.attempt <= past.attempt:
            if not past.reason:
                return DUPLICATE
            why = f"that attempt ended: {past.reason}"
        elif current_attempt is not None:
            why = f"attempt {current_attempt} has begun"
        else:
            return None
        which = f"record {header.record_id!r} belongs to attempt {header.attempt} at its group"
        return PutVerdict(PutStatus.REFUSED, f"{which}, and {why}")

    def _note(self, group_id: str, past: _Past) -> None:
        self._past.pop(group_id, None)
        self._past[group_id] = past
        while len(self._past) > self._limit:
            del self._past[next(iter(self._past))]
