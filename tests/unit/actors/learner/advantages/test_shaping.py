import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.advantages.shaping import (
    check_shaping,
    clip_and_scale,
    group_length_penalty,
    linear_length_penalty,
    overlong_penalty,
    shape_rewards,
)
from headrace.engine.config.algorithm import ShapingConfig
from headrace.engine.errors import ConfigError, InputError

groups = st.lists(st.tuples(st.integers(0, 4).map(lambda n: n / 4), st.integers(0, 120)), min_size=1, max_size=8)


def test_overlong_ramp() -> None:
    """K-087: the ramp is the last 20 tokens before the limit; -0.5 at length 60 would read it as a threshold."""
    lengths = [60, 79, 80, 85, 90, 100, 101]
    penalty = overlong_penalty(lengths, max_tokens=100, ramp_tokens=20)
    assert penalty == pytest.approx([0, 0, 0, -0.25, -0.5, -1, -1])
    half = overlong_penalty(lengths, max_tokens=100, ramp_tokens=20, factor=0.5)
    assert half == pytest.approx([0, 0, 0, -0.125, -0.25, -0.5, -0.5])


def test_overlong_ramp_is_applied_once_and_leaves_the_raw_outcome() -> None:
    """K-087: shaping the same raw rewards again gives the same shaped ones."""
    raw = np.array([1.0, 0.0, 1.0])
    raw.flags.writeable = False
    lengths = np.array([60, 90, 101])
    config = ShapingConfig(overlong_tokens=20, max_tokens=100)
    first, second = shape_rewards(raw, lengths, config), shape_rewards(raw, lengths, config)
    assert first.tolist() == second.tolist() == pytest.approx([1.0, -0.5, 0.0])
    assert raw.tolist() == [1.0, 0.0, 1.0]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.data())
def test_the_ramp_is_the_papers_three_pieces(limit: int, data: st.DataObject) -> None:
    ramp, length = data.draw(st.integers(1, limit)), data.draw(st.integers(0, 2 * limit))
    if length <= limit - ramp:
        expected = 0.0
    elif length <= limit:
        expected = ((limit - ramp) - length) / ramp
    else:
        expected = -1.0
    assert overlong_penalty([length], max_tokens=limit, ramp_tokens=ramp) == pytest.approx([expected])


def test_the_linear_penalty_costs_each_token_the_same() -> None:
    penalty = linear_length_penalty([0, 25, 50, 100, 400], max_tokens=100, coef=0.4)
    assert penalty == pytest.approx([0.0, -0.1, -0.2, -0.4, -0.4])


def test_the_group_penalty_of_four_answers_worked_out_by_hand() -> None:
    """Kimi k1.5: lengths 10 to 50, so 0.5 - (length - 10) / 40; a short wrong answer earns nothing."""
    penalty = group_length_penalty([10, 20, 50, 20], [True, True, False, False], coef=1.0)
    assert penalty == pytest.approx([0.5, 0.25, -0.5, 0.0])
    assert group_length_penalty([10, 20, 50, 20], [True] * 4, coef=0.2) == pytest.approx([0.1, 0.05, -0.1, 0.05])


def test_answers_of_equal_length_have_no_group_penalty() -> None:
    assert group_length_penalty([7, 7, 7], [True, False, True], coef=1.0).tolist() == [0.0, 0.0, 0.0]
    assert group_length_penalty([7], [True], coef=1.0).tolist() == [0.0]


@settings(max_examples=40, deadline=None)
@given(groups)
def test_the_group_penalty_is_the_papers_formula_for_each_answer(group: list[tuple[float, int]]) -> None:
    lengths = [length for _, length in group]
    config = ShapingConfig(length_penalty="group", length_coef=0.5, right_from=0.75)
    shaped = shape_rewards([reward for reward, _ in group], lengths, config)
    for value, (reward, length) in zip(shaped.tolist(), group, strict=True):
        if max(lengths) == min(lengths):
            bonus = 0.0
        else:
            bonus = 0.5 - (length - min(lengths)) / (max(lengths) - min(lengths))
            bonus = bonus if reward >= 0.75 else min(0.0, bonus)
        assert value == pytest.approx(reward + 0.5 * bonus)


def test_clipping_comes_before_scaling() -> None:
    assert clip_and_scale([-9.0, 0.5, 9.0], clip=2.0, scale=10.0).tolist() == [-20.0, 5.0, 20.0]
    assert clip_and_scale([-9.0, 9.0], scale=0.5).tolist() == [-4.5, 4.5]


def test_penalties_come_after_the_scale() -> None:
    config = ShapingConfig(reward_clip=1.0, reward_scale=10.0, overlong_tokens=20, max_tokens=100)
    assert shape_rewards([5.0, 5.0], [10, 100], config) == pytest.approx([10.0, 9.0])
    linear = ShapingConfig(reward_scale=10.0, length_penalty="linear", length_coef=0.5, max_tokens=100)
    assert shape_rewards([1.0], [50], linear) == pytest.approx([9.75])


def test_whether_an_answer_is_right_is_told_by_its_raw_reward() -> None:
    config = ShapingConfig(reward_clip=0.5, length_penalty="group", length_coef=1.0)
    assert shape_rewards([1.0, 1.0], [1, 2], config) == pytest.approx([1.0, 0.0])


def test_nothing_set_leaves_rewards_as_they_are_in_a_new_array() -> None:
    raw = np.array([0.5, -3.0])
    shaped = shape_rewards(raw, [1, 2], ShapingConfig())
    assert shaped.tolist() == raw.tolist()
    assert not np.shares_memory(shaped, raw)


@settings(max_examples=40, deadline=None)
@given(groups, st.randoms(use_true_random=False))
def test_the_order_of_answers_changes_nothing(group: list[tuple[float, int]], rng: object) -> None:
    config = ShapingConfig(length_penalty="group", length_coef=1.0, overlong_tokens=30, max_tokens=100)
    order = list(range(len(group)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    shaped = shape_rewards([r for r, _ in group], [n for _, n in group], config)
    shuffled = shape_rewards([group[i][0] for i in order], [group[i][1] for i in order], config)
    assert shuffled.tolist() == shaped[order].tolist()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (ShapingConfig(overlong_tokens=5), "max_tokens is 0"),
        (ShapingConfig(length_penalty="linear", length_coef=1.0), "max_tokens is 0"),
        (ShapingConfig(overlong_tokens=11, max_tokens=10), "lower it"),
        (ShapingConfig(length_penalty="group"), 'length_penalty = "group" with length_coef = 0 has no effect'),
        (ShapingConfig(length_coef=0.5), 'length_penalty = "none" with length_coef = 0.5 has no effect'),
        (ShapingConfig(overlong_factor=0.5), "overlong_factor = 0.5 with overlong_tokens = 0 has no effect"),
        (ShapingConfig(overlong_tokens=5, max_tokens=10, overlong_factor=0.0), "overlong_factor = 0 with"),
    ],
)
def test_settings_that_cannot_work_are_refused(config: ShapingConfig, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_shaping(config)
    with pytest.raises(ConfigError, match=sentence):
        shape_rewards([1.0], [3], config)


def test_a_ramp_as_long_as_the_limit_is_allowed() -> None:
    check_shaping(ShapingConfig(overlong_tokens=10, max_tokens=10))


@pytest.mark.parametrize(
    ("rewards", "lengths"), [([], []), ([float("nan")], [1]), ([1.0], [1, 2]), ([1.0, 0.0], [1, -2])]
)
def test_groups_outside_the_domain_are_refused(rewards: list[float], lengths: list[int]) -> None:
    with pytest.raises(InputError):
        shape_rewards(rewards, lengths, ShapingConfig())


def test_a_scale_that_overflows_is_refused_with_its_name() -> None:
    with pytest.raises(InputError, match=r"reward_scale = 1e\+300 .* lower it, or set algorithm\.shaping\.reward_clip"):
        shape_rewards([1e10, 0.0], [3, 3], ShapingConfig(reward_scale=1e300))
