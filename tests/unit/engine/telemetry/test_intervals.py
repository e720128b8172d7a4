import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.telemetry.intervals import busy_ratio, covered_s, intersection_s, merged, overlap_fraction

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


def cells(items: list[tuple[int, int]]) -> set[int]:
    return {cell for start, end in items for cell in range(start, end)}


def test_touching_and_nested_intervals_become_one() -> None:
    assert merged([(4, 5), (0, 2), (2, 3), (1, 2), (7, 7), (9, 8)]) == [(0, 3), (4, 5)]


def test_half_of_a_step_overlaps_with_sampling() -> None:
    assert overlap_fraction([(10, 20)], [(0, 12), (17, 30)]) == pytest.approx(0.5)
    assert overlap_fraction([(10, 20)], []) == 0.0
    assert math.isnan(overlap_fraction([], [(0, 1)]))
    assert busy_ratio([(0, 5), (4, 6), (9, 20)], 2, 12) == pytest.approx(0.7)
    assert math.isnan(busy_ratio([(0, 5)], 3, 3))


def test_an_open_interval_is_busy_to_the_end_of_the_window() -> None:
    assert busy_ratio([(5, math.inf)], 0, 10) == pytest.approx(0.5)
    assert overlap_fraction([(0, 10)], [(8, math.inf)]) == pytest.approx(0.2)


@given(intervals, intervals)
def test_the_figures_agree_with_counting_cells(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    assert covered_s(a) == len(cells(a))
    assert intersection_s(a, b) == len(cells(a) & cells(b))
    assert busy_ratio(a, 10, 50) == pytest.approx(len(cells(a) & set(range(10, 50))) / 40)
