"""In which order ready groups are taken: implementations of `Sampler`. All are pure; the generator is passed in.

A sampler chooses whole groups, since only whole groups are ready. A new one is one class and one line in `SAMPLERS`, or
an entry point of `headrace.samplers`.
"""

import difflib

import numpy as np
import numpy.typing as npt

from headrace.buffers.groups import GroupView
from headrace.engine.errors import ConfigError, UsageError
from headrace.engine.interfaces import Sampler, TableView
from headrace.engine.types import PolicyVersion

_LEAST_WEIGHT = 1e-300


class FifoSampler:
    """Longest in the table first."""

    def select(self, view: TableView, n: int, version: PolicyVersion, rng: np.random.Generator) -> list[int]:
        return _first(np.argsort(view.inserted, kind="stable"), n)


class FreshestSampler:
    """Newest policy first (by the oldest token), and among equals the latest insertion."""

    def select(self, view: TableView, n: int, version: PolicyVersion, rng: np.random.Generator) -> list[int]:
        return _first(np.lexsort((-view.inserted, -view.oldest_versions)), n)


class CompletionSampler:
    """In the order in which groups became ready; short generations come before long ones."""

    def select(self, view: TableView, n: int, version: PolicyVersion, rng: np.random.Generator) -> list[int]:
        order = view.completed if isinstance(view, GroupView) else view.inserted
        return _first(np.argsort(order, kind="stable"), n)


class UniformSampler:
    """Each ready group with the same probability, without replacement."""

    def select(self, view: TableView, n: int, version: PolicyVersion, rng: np.random.Generator) -> list[int]:
        return _first(rng.permutation(len(view.inserted)), n)


class PrioritizedSampler:
    """Without replacement, with probability proportional to priority ** alpha (Schaul et al. 2016, equation 1).

    Drawn by exponential keys, log(u) / weight, largest first (Efraimidis and Spirakis 2006, algorithm A). A priority of
    0 is taken only when nothing else is left.

    Args:
        alpha: 0 is uniform, 1 is fully proportional.
    """

    def __init__(self, alpha: float = 0.6) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise UsageError(f"alpha of a prioritized sampler is {alpha}; it must lie between 0 and 1")
        self._alpha = alpha

    def select(self, view: TableView, n: int, version: PolicyVersion, rng: np.random.Generator) -> list[int]:
        priorities = view.priorities
        if not bool(np.all(np.isfinite(priorities) & (priorities >= 0.0))):
            raise UsageError("a priority is negative or not finite; give every group a finite priority of at least 0")
        weights = np.where(priorities > 0.0, np.maximum(priorities**self._alpha, _LEAST_WEIGHT), _LEAST_WEIGHT)
        # 1 - random() lies in (0, 1], so the logarithm is finite, and so is its quotient by the least weight.
        keys = np.log(1.0 - rng.random(len(weights))) / weights
        return _first(np.argsort(-keys, kind="stable"), n)


SAMPLERS: dict[str, type[Sampler]] = {
    "fifo": FifoSampler,
    "freshest": FreshestSampler,
    "group_complete": CompletionSampler,
    "uniform": UniformSampler,
    "prioritized": PrioritizedSampler,
}


def sampler_named(name: str) -> Sampler:
    """A shipped sampler with its defaults.

    Raises:
        ConfigError: There is none of this name.
    """
    kind = SAMPLERS.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, SAMPLERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"there is no sampler {name!r}; the samplers are {', '.join(SAMPLERS)}{hint}")
    return kind()


def _first(order: npt.NDArray[np.int64], n: int) -> list[int]:
    return [int(position) for position in order[:n]]
