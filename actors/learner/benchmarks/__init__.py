"""`headrace bench learner`: the batch planner, one file each; figures are described at the head of their file."""

from collections.abc import Callable
from typing import cast

from headrace.engine.plugins import load_object

# By name, so that what needs torch is imported only when it runs, and says so where torch is missing.
_PARTS = ("headrace.actors.learner.benchmarks.plan:figures",)


def run() -> dict[str, float]:
    """The figures of all parts, measured one after another. Blocks for as long as they take.

    Raises:
        UsageError: A module that a part needs is not installed.
    """
    measured: dict[str, float] = {}
    for part in [cast(Callable[[], dict[str, float]], load_object(name)) for name in _PARTS]:
        found = part()
        assert not found.keys() & measured.keys(), "two parts use one name for a figure"
        measured |= found
    return measured
