"""When a run whose groups all fail has to end.

A single failure is absorbed: the group begins anew, or is dropped. If nothing but failures comes, the run would go on
for ever, sampling for nothing; then it ends with the last reason.

Invariants:
- A group that was scored ends the streak.
- Only groups that were given up count, so each stands for all its attempts.
"""

from headrace.engine.errors import HeadraceError, NoProgressError, RewardError
from headrace.engine.types import DropReason

_MIN_FAILED = 8
_MAX_TOO_LONG = 1000  # prompts of one file may well be long ones all over


class FailureStreak:
    """Counts groups that were dropped one after the other for something that failed.

    Args:
        groups_per_step: A streak of two whole steps is one too many.
    """

    def __init__(self, groups_per_step: int) -> None:
        self._limit = max(_MIN_FAILED, 2 * groups_per_step)
        self._counts: dict[DropReason, int] = {}
        self._last = ""

    def failed(self, why: str) -> None:
        """An attempt failed; remembers the reason for the message."""
        self._last = why

    def succeeded(self) -> None:
        """A group was sampled and scored."""
        self._counts.clear()

    def dropped(self, reason: DropReason) -> HeadraceError | None:
        """A group was given up; returns the error that the run has to end with, if this was one too many."""
        count = self._counts[reason] = self._counts.get(reason, 0) + 1
        match reason:
            case DropReason.REWARD_FAILED if count >= self._limit:
                return RewardError(
                    f"{count} groups in a row got no reward: {self._last}; mend the scorer, "
                    'or set reward.on_failure to "impute"'
                )
            case DropReason.ROLLOUT_FAILED if count >= self._limit:
                return NoProgressError(
                    f"{count} groups in a row could not be sampled in {count} times all their attempts: {self._last}; "
                    "see the logs of the rollout workers"
                )
            case DropReason.PROMPT_TOO_LONG if count >= _MAX_TOO_LONG:
                return NoProgressError(f"{count} prompts in a row were dropped because they do not fit: {self._last}")
            case _:
                return None
