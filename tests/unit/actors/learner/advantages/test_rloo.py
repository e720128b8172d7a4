import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.advantages.group_relative import credit_by_id
from headrace.actors.learner.advantages.rloo import rloo_advantages
from headrace.engine.errors import InputError

groups = st.lists(st.floats(-100, 100), min_size=2, max_size=12)


def mean_of_the_others(rewards: list[float]) -> list[float]:
    """The formula as the paper writes it, member by member."""
    credit: list[float] = []
    for index, reward in enumerate(rewards):
        others = rewards[:index] + rewards[index + 1 :]
        credit.append(reward - sum(others) / len(others))
    return credit


@pytest.mark.parametrize(
    ("rewards", "credit"),
    [([1, 0, 0, 1, 0], [0.75, -0.5, -0.5, 0.75, -0.5]), ([0.3, 0.9], [-0.6, 0.6]), ([0.4], [0.0])],
)
def test_rloo_ragged(rewards: list[float], credit: list[float]) -> None:
    """K-064: unequal groups, and a single member gets 0, neither its raw reward nor 0/0."""
    assert rloo_advantages(rewards) == pytest.approx(credit, abs=1e-6)


def test_rloo_ragged_rows_of_a_batch_belong_together_by_id() -> None:
    """K-064, K-005: the groups of one batch arrive in any order."""
    ids = ["a", "b", "a", "c", "a", "b", "a", "a"]
    rewards = [1, 0.3, 0, 0.4, 0, 0.9, 1, 0]
    credit = credit_by_id(ids, rewards, rloo_advantages)
    assert credit == pytest.approx([0.75, -0.6, -0.5, 0.0, -0.5, 0.6, 0.75, -0.5], abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(groups)
def test_the_closed_form_is_the_mean_of_the_others(rewards: list[float]) -> None:
    largest = max(map(abs, rewards))
    assert rloo_advantages(rewards) == pytest.approx(mean_of_the_others(rewards), abs=1e-6 * largest + 1e-30)


@settings(max_examples=40, deadline=None)
@given(groups)
def test_credit_sums_to_0_and_no_constant_changes_it(rewards: list[float]) -> None:
    scale = max(1.0, *map(abs, rewards))
    credit = rloo_advantages(rewards).astype(np.float64)
    assert abs(credit.sum()) < 1e-5 * scale
    assert rloo_advantages([reward + 8.0 for reward in rewards]) == pytest.approx(credit, abs=1e-5 * scale)


@settings(max_examples=40, deadline=None)
@given(groups, st.randoms(use_true_random=False))
def test_credit_follows_its_sample_under_any_order(rewards: list[float], rng: object) -> None:
    order = list(range(len(rewards)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    shuffled = rloo_advantages([rewards[index] for index in order])
    assert shuffled == pytest.approx(rloo_advantages(rewards)[order], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zero_variance_gives_exactly_zero(dtype: type) -> None:
    """K-024: seven equal rewards whose float32 mean is off by one rounding step."""
    assert rloo_advantages(np.full(7, 0.1, dtype=dtype)).tolist() == [0.0] * 7


def test_the_baseline_leaves_the_gradient_unbiased() -> None:
    """Over all pairs of draws of a coin with p(1) = 0.3, the estimate averages to d/dlogit E[r] = p (1 - p)."""
    probability = (0.7, 0.3)
    score = (-0.3, 0.7)  # d log p(outcome) / d logit
    total = 0.0
    for first in (0, 1):
        for second in (0, 1):
            credit = rloo_advantages([float(first), float(second)])
            estimate = (credit[0] * score[first] + credit[1] * score[second]) / 2
            total += probability[first] * probability[second] * float(estimate)
    assert total == pytest.approx(0.21, abs=1e-6)


@pytest.mark.parametrize("rewards", [[], [1.0, float("nan")], [float("inf"), 0.0], [[1.0, 2.0]], [1e300, 0.0]])
def test_rewards_outside_the_domain_are_refused(rewards: list[float]) -> None:
    with pytest.raises(InputError):
        rloo_advantages(rewards)
