import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.advantages.moments import Moments, whiten
from headrace.engine.errors import InputError

parts = st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), min_size=1, max_size=5)


def test_moments_of_four_numbers_worked_out_by_hand() -> None:
    moments = Moments.of([2.0, 4.0, 6.0, 8.0])
    assert (moments.weight, moments.mean, moments.spread) == (4.0, 5.0, 20.0)
    assert moments.deviation == pytest.approx(5**0.5)


def test_a_weight_of_2_is_the_same_value_twice() -> None:
    twice, weighed = Moments.of([1.0, 4.0, 4.0]), Moments.of([1.0, 4.0], [1, 2])
    assert weighed.mean == pytest.approx(twice.mean)
    assert weighed.spread == pytest.approx(twice.spread)
    assert weighed.weight == 3.0


def test_a_mask_as_weight_never_reads_what_it_masks() -> None:
    assert Moments.of([1.0, np.nan, 3.0, np.inf], [1, 0, 1, 0]) == Moments.of([1.0, 3.0])


@settings(max_examples=40, deadline=None)
@given(parts)
def test_merged_parts_are_the_moments_of_the_whole(values: list[list[float]]) -> None:
    merged = Moments.merged(Moments.of(part) for part in values)
    whole = np.array([value for part in values for value in part])
    assert merged.weight == whole.size
    if whole.size:
        assert merged.mean == pytest.approx(np.mean(whole), abs=1e-9)
        assert merged.spread == pytest.approx(np.sum((whole - np.mean(whole)) ** 2), rel=1e-9, abs=1e-6)
        assert merged.largest == np.max(np.abs(whole))


def test_a_mean_large_beside_the_deviation_costs_no_digits() -> None:
    """Sums of squares would give a deviation of 0 or the root of a negative number here."""
    moments = Moments.of([1e6 + 1.0]).merge(Moments.of([1e6 + 3.0]))
    assert moments.deviation == pytest.approx(1.0, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.floats(-1e6, 1e6), st.integers(1, 40))
def test_equal_values_have_exactly_no_deviation(value: float, count: int) -> None:
    assert Moments.of([value] * count).deviation == 0.0
    assert Moments.of(np.full(count, np.float32(value))).deviation == 0.0


def test_values_one_float32_rounding_step_apart_have_no_deviation() -> None:
    step = float(np.nextafter(np.float32(0.1), np.float32(1)))
    assert Moments.of([float(np.float32(0.1)), step]).deviation == 0.0
    assert Moments.of([float(np.float32(0.1))]).merge(Moments.of([step])).deviation == 0.0
    assert Moments.of([0.1, 0.1001]).deviation > 0.0


def test_nothing_has_no_deviation_and_changes_nothing() -> None:
    some = Moments.of([1.0, 2.0])
    assert Moments.of([]).deviation == 0.0
    assert some.merge(Moments()) == some == Moments().merge(some)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-20, 20), min_size=2, max_size=10))
def test_whitened_values_have_mean_0_and_deviation_1(values: list[int]) -> None:
    moments = Moments.of(values)
    white = whiten(values, moments)
    if len(set(values)) == 1:
        assert white.tolist() == [0.0] * len(values)
    else:
        assert np.mean(white) == pytest.approx(0.0, abs=1e-9)
        assert np.std(white) == pytest.approx(1.0)


def test_whitening_by_the_moments_of_all_ranks_is_that_of_the_whole_batch() -> None:
    ranks = [np.array([1.0, 5.0, 2.0]), np.array([9.0]), np.array([])]
    whole = np.concatenate(ranks)
    moments = Moments.merged(Moments.of(rank) for rank in ranks)
    white = np.concatenate([whiten(rank, moments) for rank in ranks])
    assert white == pytest.approx((whole - whole.mean()) / whole.std())


def test_whitening_gives_0_at_masked_tokens_whatever_stands_there() -> None:
    values, mask = [1.0, np.nan, 3.0, 7.0], [1, 0, 1, 0]
    moments = Moments.of(values, mask)
    assert whiten(values, moments, mask=mask).tolist() == [-1.0, 0.0, 1.0, 0.0]
    assert whiten(values, moments, mask=mask, center=False).tolist() == [1.0, 0.0, 3.0, 0.0]


def test_without_centring_values_are_only_scaled() -> None:
    values = [2.0, 6.0]
    assert whiten(values, Moments.of(values), center=False).tolist() == [1.0, 3.0]
    assert whiten([3.0, 3.0], Moments.of([3.0, 3.0]), center=False).tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("values", "weights"),
    [([1.0, np.nan], None), ([1.0], [1.0, 2.0]), ([1.0], [-1.0]), ([1.0], [np.nan]), ([1e200, -1e200], None)],
)
def test_moments_outside_the_domain_are_refused(values: list[float], weights: list[float] | None) -> None:
    with pytest.raises(InputError):
        Moments.of(values, weights)


def test_sets_too_far_apart_are_refused_instead_of_an_infinite_deviation() -> None:
    with pytest.raises(InputError, match="scale the values down"):
        Moments.of([1e200]).merge(Moments.of([-1e200]))
