"""Conformance of a `Sampler`."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.engine.interfaces import Sampler
from headrace.engine.testing.expect import expect
from headrace.engine.types import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """A `TableView` for tests; parallel read-only arrays of M items in insertion order."""

    oldest_versions: npt.NDArray[np.int64]
    inserted: npt.NDArray[np.int64]
    priorities: npt.NDArray[np.float64]


def make_view(num_items: int) -> SampleView:
    """Items with mixed versions and priorities, without randomness."""
    index = np.arange(num_items)
    arrays = (
        ((index * 5) % 7).astype(np.int64),
        (100 + index * 2).astype(np.int64),
        1.0 + ((index * 3) % 5).astype(np.float64),
    )
    for array in arrays:
        array.flags.writeable = False
    return SampleView(oldest_versions=arrays[0], inserted=arrays[1], priorities=arrays[2])


def check_sampler(
    factory: Callable[[], Sampler], make: Callable[[int], SampleView] = make_view, *, takes_all: bool = True
) -> None:
    """Run every rule of `Sampler` against one sampler.

    Args:
        factory: Makes the sampler; called twice.
        make: Makes a view of a number of items.
        takes_all: It gives as many items as are asked for and there; False for one that may hold some back.

    Raises:
        AssertionError: With one sentence on the first rule that is broken.
    """
    sampler, other = factory(), factory()
    version = PolicyVersion(0, 7)
    for num_items in (0, 1, 8, 100):
        view = make(num_items)
        for n in (0, 1, 5, num_items, num_items + 3):
            chosen = sampler.select(view, n, version, np.random.default_rng(11))
            _check_selection(chosen, n, num_items)
            if takes_all:
                expect(len(chosen) == min(n, num_items), "select() must give n items, or all where fewer are there")
            for repeat in (sampler, other):
                again = repeat.select(view, n, version, np.random.default_rng(11))
                expect(again == chosen, "select() must be pure: an equal view and generator give an equal selection")


def _check_selection(chosen: list[int], n: int, num_items: int) -> None:
    expect(all(type(position) is int for position in chosen), "select() must give a list of int")
    expect(len(chosen) <= n, "select() must give at most n items")
    expect(len(set(chosen)) == len(chosen), "select() must not give an item twice")
    expect(all(0 <= position < num_items for position in chosen), "select() must give positions in the view")
