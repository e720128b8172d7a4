"""When a run whose groups all fail has to end.

A single failure is absorbed: the group begins anew, or is dropped. If nothing but failures comes, the run would go on
for ever, sampling for nothing; then it ends with the last reason.

Invariants:
- A group that was scored ends the streak.
- Only groups that were given up count, so each stands for all its attempts.
"""

from collections.abc import Mapping

from headrace.engine.config import Config
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


def prompts_ran_out(config: Config, step: int, left: int, dropped: Mapping[DropReason, int]) -> NoProgressError:
    """What to say when there are neither prompts nor groups for another step.

    Args:
        config: Of the run.
        step: Steps that were trained.
        left: Groups that are left.
        dropped: Groups that were dropped, by reason.
    """
    told = ", ".join(f"{count} {reason.value}" for reason, count in dropped.items())
    used = f"; of the prompts, these came to nothing: {told}" if told else ""
    filtered = dropped.get(DropReason.ZERO_VARIANCE, 0)
    remedy = ', or set algorithm.dynamic_sampling = "off" to train on groups of equal rewards too' if filtered else ""
    return NoProgressError(
        f"the prompts ran out after {step} of {config.run.steps} steps, with {left} groups left, fewer than "
        f"schedule.groups_per_step = {config.schedule.groups_per_step}{used}; give more prompts, set data.epochs = 0 "
        f"to repeat them, or lower run.steps{remedy}"
    )
