"""A running deviation of rewards, so that their scale stays near 1 while the policy improves (numpy only).

Welford's update in Chan's form for batches (see `moments`). Invariants:

1. The statistics are those of all rewards ever given to `update`, whatever batches they came in (up to rounding).
2. `normalize` changes no statistics: the same rewards may be normalised twice, and are counted once.
3. Until two different rewards were seen there is no deviation, and `normalize` gives the rewards back as they are.
4. `restore(state())` on another object gives the very same results from then on.
"""

import math

import numpy as np
import numpy.typing as npt

from headrace.actors.learner.advantages.domain import finite_rewards
from headrace.actors.learner.advantages.moments import Moments, whiten
from headrace.engine.errors import InputError


class RewardNormalizer:
    """Divides rewards by their running population deviation.

    Args:
        center: Also subtract the running mean. Off by default: group-relative and leave-one-out credit subtract a
            better mean, and a critic learns the mean.
        clip: Largest absolute normalised reward; 0 is no clip.

    Raises:
        InputError: The clip is negative or not a number.
    """

    def __init__(self, *, center: bool = False, clip: float = 0.0) -> None:
        if not clip >= 0.0:
            raise InputError(f"clip is {clip}: it must not be negative; 0 is no clip")
        self._center = center
        self._clip = clip
        self._moments = Moments()

    def update(self, rewards: npt.ArrayLike) -> None:
        """Count rewards [K] in.

        Raises:
            InputError: There is none, or one is not finite; nothing was counted.
        """
        self._moments = self._moments.merge(Moments.of(finite_rewards(rewards)))

    def normalize(self, rewards: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Rewards [K] by what was counted so far: float64 [K], a new array.

        Raises:
            InputError: There is none, or one is not finite.
        """
        values = finite_rewards(rewards)
        if not self._moments.deviation:
            return values.copy()
        scaled = whiten(values, self._moments, center=self._center)
        return np.clip(scaled, -self._clip, self._clip) if self._clip else scaled

    def state(self) -> Moments:
        """The statistics, for a checkpoint."""
        return self._moments

    def restore(self, state: Moments) -> None:
        """Go on from earlier statistics.

        Raises:
            InputError: They are not those of any set of rewards.
        """
        numbers = (state.weight, state.mean, state.spread, state.largest)
        if not all(math.isfinite(number) for number in numbers) or min(state.weight, state.spread, state.largest) < 0:
            raise InputError(f"the saved reward statistics {state} are not those of any rewards: start without them")
        self._moments = state
