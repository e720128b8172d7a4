import numpy as np
import pytest

from headrace.actors.learner.advantages.dynamic_sampling import keeps_group
from headrace.actors.learner.advantages.group_relative import group_relative_advantages
from headrace.engine.errors import InputError

RAW = [[0, 0, 0, 0], [1, 1, 0, 1], [1, 1, 1, 1]]
PENALTY = [[0, -0.5, -1, -0.25], [0, 0, 0, 0], [0, -1, 0, 0]]


def test_dynamic_filter_raw() -> None:
    """K-039: one of three groups survives; a rule on shaped rewards would keep all three."""
    assert [keeps_group(raw) for raw in RAW] == [False, True, False]
    shaped = [np.add(raw, penalty) for raw, penalty in zip(RAW, PENALTY, strict=True)]
    assert all(group_relative_advantages(rewards).any() for rewards in shaped[::2])  # what the raw rule keeps out


def test_equal_verdicts_of_a_float32_scorer_are_equal() -> None:
    assert not keeps_group(np.full(7, 0.1, np.float32))
    assert not keeps_group([0.1, float(np.nextafter(np.float32(0.1), np.float32(1)))])
    assert keeps_group([0.1, 0.1001])


def test_a_single_member_has_nobody_to_be_compared_with() -> None:
    assert not keeps_group([1.0])


@pytest.mark.parametrize("rewards", [[], [1.0, float("nan")], [[1.0], [0.0]]])
def test_groups_outside_the_domain_are_refused(rewards: list[float]) -> None:
    with pytest.raises(InputError):
        keeps_group(rewards)
