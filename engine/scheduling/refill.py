"""How long groups that teach nothing may be replaced by others before the run gives up.

Dynamic sampling drops a scored group whose raw rewards are all equal and admits another prompt's in its place. With a
scorer that says 1.0 to everything, or prompts far too hard, that would never end. Invariants:

1. Every scored group is counted once, as kept or as filtered: kept + filtered = scored.
2. `in_a_row` counts the filtered groups since the last kept one; a kept group sets it to 0.
3. The budget is spent when `in_a_row` reaches rounds * groups_per_step, and not before. Then `filtered` raises, and
   goes on raising until a group is kept; a batch is never made smaller, or empty, to go on.
4. Memory is bounded by rounds * groups_per_step.

Owns no task and no clock: the hub calls `kept` or `filtered` for each scored group, as the scores arrive.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.errors import InputError, NoProgressError

# Rewards that agree to this part are equal: a float32 scorer's rounding.
_EQUAL = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillStatistics:
    """Counts of groups.

    Attributes:
        num_kept: Groups that were kept.
        num_filtered: Groups that were filtered and replaced.
        num_in_a_row: Of these, those since the last kept one.
        num_all_right, num_all_wrong: Of those in a row, the ones whose rewards all equal the largest (smallest) seen in
            the run; both 0 while only one reward was ever seen, since then nobody can tell.
    """

    num_kept: int
    num_filtered: int
    num_in_a_row: int
    num_all_right: int
    num_all_wrong: int


class RefillBudget:
    """Counts filtered groups, and says stop.

    Args:
        rounds: Steps' worth of groups that may be filtered in a row (`algorithm.dynamic_sampling_rounds`).
        groups_per_step: Groups in a step.

    Raises:
        InputError: One of them is below 1.
    """

    def __init__(self, *, rounds: int, groups_per_step: int) -> None:
        if rounds < 1 or groups_per_step < 1:
            raise InputError(f"{rounds} rounds of {groups_per_step} groups are not allowed: both must be at least 1")
        self._rounds = rounds
        self._groups_per_step = groups_per_step
        self._num_kept = 0
        self._num_filtered = 0
        self._num_in_a_row = 0
        self._extremes: list[tuple[float, float]] = []  # lowest and highest reward of the first `limit` in a row
        self._lowest = math.inf
        self._highest = -math.inf

    @property
    def limit(self) -> int:
        """Filtered groups in a row at which the budget is spent."""
        return self._rounds * self._groups_per_step

    def kept(self, raw_rewards: Sequence[float]) -> None:
        """A group with these raw rewards is trained on.

        Raises:
            InputError: There is no reward, or one is not finite; nothing was counted.
        """
        self._see(raw_rewards)
        self._num_kept += 1
        self._num_in_a_row = 0
        self._extremes.clear()

    def filtered(self, raw_rewards: Sequence[float]) -> None:
        """A group with these raw rewards is dropped, and another must take its place.

        Raises:
            NoProgressError: The budget is spent; says how many groups were filtered, why, and what to change.
            InputError: There is no reward, or one is not finite; nothing was counted.
        """
        extremes = self._see(raw_rewards)
        self._num_filtered += 1
        self._num_in_a_row += 1
        if len(self._extremes) < self.limit:
            self._extremes.append(extremes)
        if self._num_in_a_row >= self.limit:
            raise NoProgressError(self._message())

    def statistics(self) -> RefillStatistics:
        """What was counted so far."""
        can_tell = not _equal(self._lowest, self._highest)
        return RefillStatistics(
            num_kept=self._num_kept,
            num_filtered=self._num_filtered,
            num_in_a_row=self._num_in_a_row,
            num_all_right=sum(can_tell and _equal(low, self._highest) for low, _ in self._extremes),
            num_all_wrong=sum(can_tell and _equal(high, self._lowest) for _, high in self._extremes),
        )

    def _see(self, raw_rewards: Sequence[float]) -> tuple[float, float]:
        if not len(raw_rewards) or not all(math.isfinite(reward) for reward in raw_rewards):
            raise InputError(f"the raw rewards of a group are {raw_rewards}: at least one is needed, all finite")
        low, high = float(min(raw_rewards)), float(max(raw_rewards))
        self._lowest, self._highest = min(self._lowest, low), max(self._highest, high)
        return low, high

    def _message(self) -> str:
        counts = self.statistics()
        if _equal(self._lowest, self._highest):
            verdict = f"every reward of the run so far was {self._highest:g}, so look at the scorer first"
        else:
            others = len(self._extremes) - counts.num_all_right - counts.num_all_wrong
            verdict = (
                f"{counts.num_all_right} were all right (reward {self._highest:g}), {counts.num_all_wrong} all wrong "
                f"(reward {self._lowest:g}), {others} neither"
            )
        return (
            f"{counts.num_in_a_row} groups in a row were filtered because they teach nothing ({self._rounds} steps' "
            f"worth of {self._groups_per_step}; {counts.num_filtered} of {counts.num_kept + counts.num_filtered} in "
            f"the whole run): {verdict}; give prompts of another difficulty, raise schedule.group_size or "
            'algorithm.dynamic_sampling_rounds, or set algorithm.dynamic_sampling = "off"'
        )


def _equal(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=_EQUAL, abs_tol=0.0)
