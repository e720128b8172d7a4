import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.scheduling.best_fit import best_fit


def fewest_bins(sizes: Sequence[int], capacity: int) -> int:
    """By trying every assignment of sizes to bins."""
    for num_bins in range(len(sizes) + 1):
        for places in itertools.product(range(num_bins), repeat=len(sizes)):
            loads = [0] * num_bins
            for place, size in zip(places, sizes, strict=True):
                loads[place] += size
            if all(load <= capacity for load in loads):
                return num_bins
    raise AssertionError("a size is over the capacity")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 10), max_size=6), st.integers(10, 20))
def test_bins_are_at_most_eleven_ninths_of_the_fewest_and_one(sizes: list[int], capacity: int) -> None:
    assert 9 * len(best_fit(sizes, capacity)) <= 11 * fewest_bins(sizes, capacity) + 9


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(-5, 40))
def test_everything_is_in_one_bin_and_no_two_bins_fit_together(sizes: list[int], capacity: int) -> None:
    bins = best_fit(sizes, capacity)
    assert sorted(position for positions in bins for position in positions) == list(range(len(sizes)))
    loads = [sum(sizes[position] for position in positions) for positions in bins]
    assert all(load <= capacity or len(positions) == 1 for load, positions in zip(loads, bins, strict=True))
    assert all(one + other > capacity for one, other in itertools.combinations([load for load in loads if load], 2))


@pytest.mark.parametrize("sizes, bins", [([], []), ([3], [[0]]), ([4, 6, 5, 5], [[1, 0], [2, 3]])])
def test_the_fullest_bin_that_has_room_is_taken(sizes: list[int], bins: list[list[int]]) -> None:
    assert best_fit(sizes, 10) == bins
