import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.advantages.reinforce import batch_normalized_advantages
from headrace.engine.errors import InputError

rewards = st.integers(-8, 8).map(lambda number: number / 4)
batches = st.lists(st.lists(rewards, min_size=1, max_size=5), min_size=1, max_size=5)


def derived(groups: list[list[float]], lengths: list[list[int]] | None, *, baseline: bool) -> list[list[float]]:
    """The formulas sample by sample; a sample stands in the statistics once, or once for each of its tokens."""
    centred = [[reward - (sum(group) / len(group) if baseline else 0.0) for reward in group] for group in groups]
    population: list[float] = []
    for index, group in enumerate(centred):
        for member, value in enumerate(group):
            population += [value] * (1 if lengths is None else lengths[index][member])
    mean = math.fsum(population) / len(population)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in population) / len(population))
    if deviation < 1e-12:
        return [[0.0] * len(group) for group in groups]
    return [[(value - mean) / deviation for value in group] for group in centred]


def test_two_groups_worked_out_by_hand() -> None:
    """Rewards 1 0 0 | 1: mean 0.5, deviation 0.5. Centred by group 2/3 -1/3 -1/3 | 0: deviation sqrt(6/9/4)."""
    plain = batch_normalized_advantages([[1, 0, 0], [1]])
    assert [group.tolist() for group in plain] == [[1.0, -1.0, -1.0], [1.0]]
    first, second = batch_normalized_advantages([[1, 0, 0], [1]], group_baseline=True)
    assert first == pytest.approx(np.array([2 / 3, -1 / 3, -1 / 3]) / math.sqrt(1 / 6), abs=1e-6)
    assert second.tolist() == [0.0]


def test_token_weights_worked_out_by_hand() -> None:
    """Rewards 1 and 0 with 3 tokens and 1: mean 0.75, variance 0.75 * 0.25."""
    (credit,) = batch_normalized_advantages([[1.0, 0.0]], lengths=[[3, 1]])
    assert credit == pytest.approx([0.25 / math.sqrt(0.1875), -0.75 / math.sqrt(0.1875)], abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(batches, st.booleans())
def test_credit_is_that_of_the_formula(groups: list[list[float]], baseline: bool) -> None:
    credit = batch_normalized_advantages(groups, group_baseline=baseline)
    for given_credit, expected in zip(credit, derived(groups, None, baseline=baseline), strict=True):
        assert given_credit.dtype == np.float32
        assert given_credit == pytest.approx(expected, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(batches, st.booleans(), st.data())
def test_token_weights_are_those_of_the_formula(groups: list[list[float]], baseline: bool, data: st.DataObject) -> None:
    lengths = [[data.draw(st.integers(1, 6)) for _ in group] for group in groups]
    credit = batch_normalized_advantages(groups, group_baseline=baseline, lengths=lengths)
    for given_credit, expected in zip(credit, derived(groups, lengths, baseline=baseline), strict=True):
        assert given_credit == pytest.approx(expected, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(batches)
def test_a_batch_has_mean_0_and_unit_deviation(groups: list[list[float]]) -> None:
    credit = np.concatenate(batch_normalized_advantages(groups)).astype(np.float64)
    assert np.mean(credit) == pytest.approx(0.0, abs=1e-5)
    assert np.std(credit) == pytest.approx(1.0, abs=1e-5) or not credit.any()


@settings(max_examples=40, deadline=None)
@given(batches, st.randoms(use_true_random=False), st.booleans())
def test_the_order_of_groups_changes_nothing(groups: list[list[float]], rng: object, baseline: bool) -> None:
    order = list(range(len(groups)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    credit = batch_normalized_advantages(groups, group_baseline=baseline)
    shuffled = batch_normalized_advantages([groups[index] for index in order], group_baseline=baseline)
    for place, index in enumerate(order):
        assert shuffled[place] == pytest.approx(credit[index], abs=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zero_variance_gives_exactly_zero(dtype: type) -> None:
    """K-024: no group is pushed by rounding, and with the baseline not even beside a group that is."""
    flat = np.full(7, 0.1, dtype=dtype)
    assert not np.concatenate(batch_normalized_advantages([flat, flat])).any()
    beside, first = batch_normalized_advantages([flat, np.array([1.0, 0.0, 0.3])], group_baseline=True)
    assert beside.tolist() == [0.0] * 7
    assert first.any()
    assert not np.concatenate(batch_normalized_advantages([flat, flat + 1], group_baseline=True)).any()


def test_float32_rounding_between_groups_is_no_difference() -> None:
    """K-024: two scorers' 0.1, one rounding step apart, push nobody."""
    batch = [[0.1, 0.1], [float(np.nextafter(np.float32(0.1), np.float32(1)))]]
    for baseline in (False, True):
        assert not np.concatenate(batch_normalized_advantages(batch, group_baseline=baseline)).any()


def test_a_single_sample_gets_no_credit() -> None:
    assert [group.tolist() for group in batch_normalized_advantages([[0.7]])] == [[0.0]]


def test_no_groups_give_no_credit() -> None:
    assert batch_normalized_advantages([]) == []


@pytest.mark.parametrize("baseline", [False, True])
def test_huge_rewards_have_the_credit_of_small_ones(baseline: bool) -> None:
    (huge,) = batch_normalized_advantages([[1e308, 1e308, 0.0]], group_baseline=baseline)
    (small,) = batch_normalized_advantages([[1.0, 1.0, 0.0]], group_baseline=baseline)
    assert huge == pytest.approx(small)


def test_a_group_of_small_rewards_is_not_lost_beside_one_of_large_ones() -> None:
    large, small = batch_normalized_advantages([[1e6, 1e6], [0.0, 0.05]], group_baseline=True)
    assert large.tolist() == [0.0, 0.0]
    assert small == pytest.approx([-(2**0.5), 2**0.5])


@pytest.mark.parametrize(
    ("groups", "lengths"),
    [
        ([[1.0], []], None),
        ([[1.0, float("nan")]], None),
        ([[1.0, 0.0]], [[3]]),
        ([[1.0, 0.0]], [[3, -1]]),
        ([[1.0, 0.0]], [[0, 0]]),
        ([[1.0]], []),
    ],
)
def test_batches_outside_the_domain_are_refused(groups: list[list[float]], lengths: list[list[int]] | None) -> None:
    with pytest.raises(InputError):
        batch_normalized_advantages(groups, lengths=lengths)
