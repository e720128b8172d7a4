"""States of a model before and after an update, made such that they resemble training; no model is needed.

Masters in float32 are normal with a deviation of `SIGMA`. An update adds to each a learning rate times a normal number,
as Adam's normalised steps do, and what is published is the masters rounded to bfloat16. So whether an element changes,
and by how many neighbouring floats, follows from its size and its place between two of them, as it does in training.
The learning rate is found that changes the wanted share: a higher one changes more elements, and moves more of them by
several neighbours.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.engine.weights.layout import BUCKET_ELEMENTS
from headrace.engine.weights.ulp import order

SIGMA = 0.05

Half = npt.NDArray[np.uint16]
Float = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """A published state before and after an update, in buckets.

    Attributes:
        base: Bits of bfloat16, each bucket of shape [bucket_elements].
        new: The same after the update.
        learning_rate: That gives this update.
        changed: Elements whose bits differ.
        one_ulp: The share of these that moved to the neighbouring float.
    """

    base: list[Half]
    new: list[Half]
    learning_rate: float
    changed: int
    one_ulp: float

    @property
    def num_bytes(self) -> int:
        """Of one state."""
        return sum(bucket.nbytes for bucket in self.base)


class Model:
    """Masters of a number of buckets, and the direction of an update."""

    def __init__(self, num_buckets: int, bucket_elements: int = BUCKET_ELEMENTS) -> None:
        rng = np.random.default_rng(0)
        shape = (num_buckets, bucket_elements)
        self._masters: Float = rng.standard_normal(shape, np.float32)
        self._masters *= np.float32(SIGMA)
        self._direction: Float = rng.standard_normal(shape, np.float32)

    @property
    def num_elements(self) -> int:
        """Of the whole model."""
        return self._masters.size

    def states(self, share: float) -> States:
        """The published states around an update that changes about this share of the elements."""
        rate = self._learning_rate(share)
        base = [published(masters) for masters in self._masters]
        new = [_updated(masters, step, rate) for masters, step in zip(self._masters, self._direction, strict=True)]
        steps = [order(after) - order(before) for before, after in zip(base, new, strict=True)]
        changed = sum(int(np.count_nonzero(step)) for step in steps)
        one_ulp = sum(int(np.count_nonzero((step == 1) | (step == -1))) for step in steps)
        return States(base=base, new=new, learning_rate=rate, changed=changed, one_ulp=one_ulp / max(1, changed))

    def _learning_rate(self, share: float) -> float:
        masters, direction = self._masters[0, : 1 << 20], self._direction[0, : 1 << 20]
        before = published(masters)
        low, high = 1e-11, 1e-2
        for _ in range(16):
            rate = (low * high) ** 0.5
            changed = np.count_nonzero(_updated(masters, direction, rate) != before)
            low, high = (rate, high) if changed < share * len(before) else (low, rate)
        return high


def published(masters: Float) -> Half:
    """float32 rounded to the nearest bfloat16, ties to even, as bits."""
    bits = masters.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)


def _updated(masters: Float, direction: Float, learning_rate: float) -> Half:
    after = np.multiply(direction, np.float32(learning_rate), dtype=np.float32)
    after += masters
    return published(after)
