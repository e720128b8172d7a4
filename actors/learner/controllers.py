"""Coefficients that follow the measured distance between policies: the KL coefficient and the learning rate.

Both are state machines without a clock: one call of `update` an optimizer step, with that step's mean KL in nats a
token (the same number on every rank, so that all ranks move alike). Invariants:

1. The value never leaves its bounds, whatever is measured.
2. One update changes it by a bounded factor, so that one wild batch cannot undo a run.
3. A measurement that is not finite (a skipped step has none) changes nothing.
4. `restore(state())` on another object gives the very same values from then on.
"""

import math
from dataclasses import dataclass

from headrace.engine.errors import ConfigError, InputError

# The relative error at which the proportional controller saturates (arXiv 1909.08593, section 2.2).
MAX_ERROR = 0.2
# Where the factor of one update ends; only the shortest horizon comes below it, at 0.
_LEAST_FACTOR = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """A closed range of positive numbers."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0.0 < self.low <= self.high < math.inf:
            raise ConfigError(f"the bounds {self.low} to {self.high} are not allowed: 0 < low <= high is needed")

    def clamp(self, value: float) -> float:
        """The nearest number within."""
        return min(max(value, self.low), self.high)

    def checked(self, name: str, value: float) -> float:
        """The value itself.

        Raises:
            ConfigError: It lies outside.
        """
        if not self.low <= value <= self.high:
            raise ConfigError(f"{name} is {value}: it must lie between {self.low} and {self.high}")
        return value


class AdaptiveKl:
    """A KL coefficient that steers the distance to the reference policy to a target.

    Ziegler et al. (arXiv 1909.08593), section 2.2: e = clip((KL - target) / target, -0.2, 0.2), then
    beta <- beta * (1 + K * e). Here K = 5 / horizon, so that at a saturated error the coefficient changes by about a
    factor of e in `horizon` updates; the paper's K = 0.1 is a horizon of 50. Farther away than the target: the
    coefficient grows, and pulls back. One update never does more than halve or double it.

    A coefficient of 0 could never grow, so it is kept above 0 by its bounds.

    Args:
        initial: The first coefficient.
        target: The distance to steer to, nats a token.
        horizon: Updates; at least 1.
        bounds: Where the coefficient stays.

    Raises:
        ConfigError: The target or the horizon is not positive, or the initial value lies outside the bounds.
    """

    def __init__(
        self, *, initial: float, target: float, horizon: int, bounds: Bounds = Bounds(low=1e-6, high=1e3)
    ) -> None:
        if not 0.0 < target < math.inf or horizon < 1:
            raise ConfigError(
                f"algorithm.kl.target = {target} and horizon = {horizon} are not allowed for an adaptive coefficient: "
                "both must be positive"
            )
        self._target = target
        self._gain = 1.0 / (MAX_ERROR * horizon)
        self._bounds = bounds
        self._coef = bounds.checked("algorithm.kl_coef of an adaptive coefficient", initial)

    @property
    def coef(self) -> float:
        """The coefficient in force."""
        return self._coef

    def update(self, measured_kl: float) -> float:
        """Take in one step's mean KL, nats a token, which may be negative; returns the next step's coefficient."""
        if math.isfinite(measured_kl):
            error = (measured_kl - self._target) / self._target
            error = min(max(error, -MAX_ERROR), MAX_ERROR)
            self._coef = self._bounds.clamp(self._coef * max(_LEAST_FACTOR, 1.0 + self._gain * error))
        return self._coef

    def state(self) -> float:
        """The coefficient, for a checkpoint."""
        return self._coef

    def restore(self, state: float) -> None:
        """Go on with a saved coefficient.

        Raises:
            InputError: It is not a positive number; one outside new bounds is clamped to them.
        """
        self._coef = self._bounds.clamp(_positive("KL coefficient", state))


class KlLearningRate:
    """A learning rate that keeps each update's KL within a band around a target.

    The measured KL is the distance that one update moved the policy (current against behaviour or proximal), nats a
    token. Above target * band the rate is divided by `factor`, below target / band it is multiplied, in between it
    stays: the rule that PPO (arXiv 1707.06347, section 4) has for its penalty, with the rate in the penalty's place.

    For small steps the distance grows with the square of the rate, so one change of the rate moves the distance by
    factor^2, while the band is band^2 wide: with `factor` at most `band` no change leaps over the band.

    Args:
        initial: The first rate.
        target: Middle of the band, nats a token.
        band: Ratio of the band's upper end to the target, above 1.
        factor: Change of the rate in one update, above 1 and at most `band`.
        bounds: Where the rate stays.

    Raises:
        ConfigError: One of them is out of its range.
    """

    def __init__(
        self,
        *,
        initial: float,
        target: float,
        band: float = 2.0,
        factor: float = 1.5,
        bounds: Bounds = Bounds(low=1e-8, high=1e-3),
    ) -> None:
        if not 0.0 < target < math.inf:
            raise ConfigError(f"the KL target of the learning rate is {target}: it must be positive, in nats a token")
        if not 1.0 < factor <= band < math.inf:
            raise ConfigError(
                f"factor = {factor} with band = {band} is not allowed: 1 < factor <= band is needed, or a change of "
                "the rate could leap over the band and back for ever"
            )
        self._low, self._high = target / band, target * band
        self._factor = factor
        self._bounds = bounds
        self._rate = bounds.checked("the learning rate", initial)

    @property
    def rate(self) -> float:
        """The rate in force."""
        return self._rate

    def update(self, measured_kl: float) -> float:
        """Take in one update's KL, nats a token, which may be negative; returns the next update's rate."""
        if math.isfinite(measured_kl):
            if measured_kl > self._high:
                self._rate = self._bounds.clamp(self._rate / self._factor)
            elif measured_kl < self._low:
                self._rate = self._bounds.clamp(self._rate * self._factor)
        return self._rate

    def state(self) -> float:
        """The rate, for a checkpoint."""
        return self._rate

    def restore(self, state: float) -> None:
        """Go on with a saved rate.

        Raises:
            InputError: It is not a positive number; one outside new bounds is clamped to them.
        """
        self._rate = self._bounds.clamp(_positive("learning rate", state))


def _positive(name: str, value: float) -> float:
    if not 0.0 < value < math.inf:
        raise InputError(f"the saved {name} is {value}: it must be a positive number; start without the saved state")
    return value
