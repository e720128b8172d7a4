import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.advantages.group_relative import (
    group_relative_advantages,
    group_relative_by_id,
    is_zero_variance,
)
from headrace.engine.errors import InputError


def test_groups_by_id_keeps_row_order_whatever_the_order_of_arrival() -> None:
    """K-005: -1.6667 for row 0 would be the mean of three consecutive rows."""
    ids, rewards = ["a", "b", "a", "b", "b", "a"], [1, 4, 3, 6, 8, 5]
    assert group_relative_by_id(ids, rewards, normalize_std=False).tolist() == [-2, -2, 0, 0, 2, 2]
    assert group_relative_by_id(ids, rewards).tolist() == [-1, -1, 0, 0, 1, 1]


def test_groups_by_id_keeps_two_groups_of_the_same_prompt_apart() -> None:
    """K-005: two ids are two groups, whatever their prompts."""
    together = group_relative_by_id(["a", "a", "a", "a"], [0, 2, 10, 12], normalize_std=False)
    apart = group_relative_by_id(["a", "a", "b", "b"], [0, 2, 10, 12], normalize_std=False)
    assert together.tolist() == [-6, -4, 4, 6]
    assert apart.tolist() == [-1, 1, -1, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zero_variance_gives_exactly_zero(dtype: type) -> None:
    """K-024: -0.41 for all would be the rounding of the float32 mean over its own size."""
    assert group_relative_advantages(np.full(7, 0.1, dtype=dtype)).tolist() == [0.0] * 7
    # One float32 rounding step between equal verdicts is still no difference.
    assert group_relative_advantages(np.array([0.1, np.nextafter(np.float32(0.1), np.float32(1))])).tolist() == [0, 0]


def test_zero_variance_covers_a_group_with_one_member() -> None:
    """K-024: 0, never NaN."""
    assert group_relative_advantages([0.7]).tolist() == [0.0]
    assert is_zero_variance([0.7])


def test_two_members_get_the_sample_deviation() -> None:
    """K-024, third part."""
    assert group_relative_advantages([1, 0]) == pytest.approx([0.707107, -0.707107], abs=1e-6)


def test_drgrpo_constant_credit_is_centred_and_not_divided() -> None:
    """K-031, the advantages."""
    assert group_relative_advantages([1, 0, 0, 0], normalize_std=False).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_credit_too_large_for_float32_is_refused() -> None:
    with pytest.raises(InputError, match=r"reward_scale"):
        group_relative_advantages([1e300, 0.0], normalize_std=False)
    assert group_relative_advantages([1e300, 0.0]) == pytest.approx([0.707107, -0.707107], abs=1e-6)


@pytest.mark.parametrize("rewards", [[], [1.0, float("nan")], [float("inf"), 0.0], [[1.0, 2.0]]])
def test_rewards_outside_the_domain_are_refused(rewards: list[float]) -> None:
    with pytest.raises(InputError):
        group_relative_advantages(rewards)


def test_a_missing_reward_is_refused() -> None:
    with pytest.raises(InputError, match="one reward an id"):
        group_relative_by_id(["a", "b"], [1.0])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-1e300, 1e300), min_size=2, max_size=16))
def test_credit_is_finite_centred_and_of_unit_deviation(rewards: list[float]) -> None:
    credit = group_relative_advantages(rewards).astype(np.float64)
    assert np.isfinite(credit).all()
    assert abs(credit.sum()) < 1e-4
    if not is_zero_variance(rewards):
        assert np.std(credit, ddof=1) == pytest.approx(1.0, rel=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-20, 20), min_size=2, max_size=9), st.booleans())
def test_credit_is_that_of_the_formula(rewards: list[int], normalize_std: bool) -> None:
    """DeepSeekMath, section 4.1.2, member by member with exact sums."""
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    divisor = deviation if normalize_std and deviation else 1.0
    credit = group_relative_advantages(rewards, normalize_std=normalize_std)
    assert credit == pytest.approx([(reward - mean) / divisor for reward in rewards], abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_credit_follows_its_sample_under_any_order(rewards: list[int], rng: object) -> None:
    order = list(range(len(rewards)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    shuffled = group_relative_advantages([rewards[i] for i in order])
    assert shuffled == pytest.approx(group_relative_advantages(rewards)[order], abs=1e-6)


@pytest.mark.parametrize("rewards", [[1e308, 1.7e308], [1.7e308, -1.7e308]])
def test_rewards_near_the_end_of_float64_are_refused_in_words_and_without_a_warning(rewards: list[float]) -> None:
    sign = -1.0 if rewards[0] < rewards[1] else 1.0
    assert group_relative_advantages(rewards) == pytest.approx([sign * 0.5**0.5, -sign * 0.5**0.5])
    with pytest.raises(InputError, match=r"does not fit into float32: lower algorithm\.shaping\.reward_scale"):
        group_relative_advantages(rewards, normalize_std=False)
