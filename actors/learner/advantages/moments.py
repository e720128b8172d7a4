"""Weighted mean and variance that can be merged, and whitening by them (numpy only).

Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979). Parts are
merged, never sums of squares: those lose all digits when the mean is large beside the deviation.
"""

import math
from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engine.errors import InputError

# A deviation below this part of the largest value is float32 rounding between equal values.
_EQUAL = float(np.finfo(np.float32).eps)


class Moments(msgspec.Struct, frozen=True, kw_only=True):
    """Weight, mean and spread of a set of numbers; the default is the empty set.

    Attributes:
        weight: Sum of the weights; the count where each is 1.
        mean: Weighted mean.
        spread: Weighted sum of squared distances from the mean.
        largest: Largest absolute value, by which equality up to rounding is judged.
    """

    weight: float = 0.0
    mean: float = 0.0
    spread: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, values: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> "Moments":
        """Moments of numbers of any shape, with weights of the same shape or 1 each.

        Values of weight 0 are never read, so a loss mask can be the weight.

        Raises:
            InputError: The sizes differ, a weight is negative or not finite, or a value that counts is not finite or so
                large that its square overflows.
        """
        numbers = np.asarray(values, dtype=np.float64).ravel()
        factors = np.ones(numbers.size) if weights is None else np.asarray(weights, dtype=np.float64).ravel()
        if numbers.shape != factors.shape or not np.isfinite(factors).all() or bool((factors < 0).any()):
            raise InputError(
                f"{factors.size} weights were given for {numbers.size} values: give one each, finite and not negative"
            )
        numbers, factors = numbers[factors > 0], factors[factors > 0]
        if not np.isfinite(numbers).all():
            raise InputError(
                "moments of a value that is not finite were asked for: mask it, or find where it came from"
            )
        if not numbers.size:
            return cls()
        weight = float(factors.sum())
        with np.errstate(over="ignore", invalid="ignore"):
            # From the first value on, so that equal values have exactly their value as the mean.
            mean = float(numbers[0] + np.sum(factors * (numbers - numbers[0])) / weight)
            spread = float(np.sum(factors * (numbers - mean) ** 2))
        largest = float(np.max(np.abs(numbers)))
        if not math.isfinite(spread):
            raise InputError(f"the squares of values as large as {largest:g} overflow: scale the values down first")
        return cls(weight=weight, mean=mean, spread=spread, largest=largest)

    def merge(self, other: "Moments") -> "Moments":
        """Moments of both sets together.

        Raises:
            InputError: They lie so far apart that the square of the distance overflows.
        """
        if not self.weight:
            return other
        if not other.weight:
            return self
        weight = self.weight + other.weight
        gap = other.mean - self.mean
        spread = self.spread + other.spread + gap * gap * self.weight * other.weight / weight
        if not math.isfinite(spread):  # an infinite deviation would make everything 0 from now on
            raise InputError(f"the square of the distance {gap:g} of two means overflows: scale the values down first")
        return Moments(
            weight=weight,
            mean=self.mean + gap * other.weight / weight,
            spread=spread,
            largest=max(self.largest, other.largest),
        )

    @classmethod
    def merged(cls, parts: Iterable["Moments"]) -> "Moments":
        """Moments of all parts together, e.g. of all ranks; merged in the same order they agree to the last bit."""
        total = cls()
        for part in parts:
            total = total.merge(part)
        return total

    @property
    def deviation(self) -> float:
        """Population deviation, sqrt(spread / weight); exactly 0 if the values are equal up to float32 rounding."""
        if not self.weight:
            return 0.0
        deviation = math.sqrt(self.spread / self.weight)
        return deviation if deviation > _EQUAL * self.largest else 0.0


def whiten(
    values: npt.ArrayLike, moments: Moments, *, mask: npt.ArrayLike | None = None, center: bool = True
) -> npt.NDArray[np.float64]:
    """(values - mean) / deviation by given moments; without `center` only the division.

    Pure: the caller decides over what the moments were taken (a micro-batch, all ranks), and reduces them itself.

    Args:
        values: Of any shape.
        moments: Of the same values, or of more.
        mask: Of the same shape, 0 where a value does not count; None counts all.
        center: Subtract the mean.

    Returns:
        float64 of the same shape, 0 where the mask is 0, whatever stands there. If the deviation is 0: all 0 with
        `center`, the values themselves without.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if mask is not None:
        numbers = np.where(np.asarray(mask) != 0, numbers, moments.mean if center else 0.0)
    deviation = moments.deviation
    if not center:
        return numbers / deviation if deviation else numbers.copy()
    return (numbers - moments.mean) / deviation if deviation else np.zeros_like(numbers)
