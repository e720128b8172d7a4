import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import InputError, NoProgressError
from headrace.engine.scheduling.refill import RefillBudget


def test_dynamic_filter_bounded() -> None:
    """K-077: a scorer that says 1.0 to everything ends the run after 3 steps' worth of groups, not one earlier."""
    budget = RefillBudget(rounds=3, groups_per_step=4)
    for _ in range(11):
        budget.filtered([1.0] * 8)
    with pytest.raises(NoProgressError) as caught:
        budget.filtered([1.0] * 8)
    message = str(caught.value)
    for part in (
        "12 groups in a row",
        "3 steps' worth of 4",
        "12 of 12 in the whole run",
        "every reward of the run so far was 1",
        "schedule.group_size",
        "algorithm.dynamic_sampling_rounds",
        'algorithm.dynamic_sampling = "off"',
    ):
        assert part in message
    assert budget.statistics().num_all_right == budget.statistics().num_all_wrong == 0  # nobody can tell


def test_dynamic_filter_bounded_tells_all_right_from_all_wrong() -> None:
    """K-077: by the largest and the smallest reward of the run, also where a kept group showed them first."""
    budget = RefillBudget(rounds=1, groups_per_step=5)
    budget.kept([1.0, -1.0])
    budget.filtered([1.0, 1.0])
    budget.filtered([1.0, 1.0 - 1e-9])
    budget.filtered([-1.0, -1.0])
    budget.filtered([0.5, 0.5])
    in_a_row, message = _message(budget, reward=1.0)
    assert in_a_row == 5
    assert "3 were all right (reward 1), 1 all wrong (reward -1), 1 neither" in message
    assert "5 of 6 in the whole run" in message


def test_a_group_filtered_by_another_rule_is_neither_right_nor_wrong() -> None:
    budget = RefillBudget(rounds=2, groups_per_step=2)
    budget.filtered([0.0, 1.0])
    counts = budget.statistics()
    assert (counts.num_in_a_row, counts.num_all_right, counts.num_all_wrong) == (1, 0, 0)


def test_a_kept_group_starts_the_count_again() -> None:
    budget = RefillBudget(rounds=1, groups_per_step=2)
    for _ in range(50):
        budget.filtered([0.0, 0.0])
        budget.kept([0.0, 1.0])
    counts = budget.statistics()
    assert (counts.num_kept, counts.num_filtered, counts.num_in_a_row) == (50, 50, 0)


def test_a_spent_budget_stays_spent_until_a_group_is_kept() -> None:
    budget = RefillBudget(rounds=1, groups_per_step=1)
    for expected in (1, 2, 3):
        assert _message(budget)[0] == expected
    budget.kept([0.0, 1.0])
    assert budget.statistics().num_in_a_row == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.5, 1.0])), max_size=60), st.integers(1, 3))
def test_each_scored_group_is_counted_once_and_the_end_comes_exactly_at_the_limit(
    events: list[tuple[bool, float]], rounds: int
) -> None:
    budget = RefillBudget(rounds=rounds, groups_per_step=3)
    in_a_row = 0
    for is_kept, reward in events:
        if is_kept:
            budget.kept([reward, reward + 1.0])
            in_a_row = 0
            continue
        in_a_row += 1
        if in_a_row >= rounds * 3:
            with pytest.raises(NoProgressError):
                budget.filtered([reward, reward])
        else:
            budget.filtered([reward, reward])
    counts = budget.statistics()
    assert counts.num_kept + counts.num_filtered == len(events)
    assert counts.num_in_a_row == in_a_row
    assert counts.num_all_right + counts.num_all_wrong <= min(in_a_row, budget.limit)


@pytest.mark.parametrize("rewards", [[], [float("nan"), 0.0], [float("inf")]])
def test_rewards_that_are_no_verdict_are_refused_and_not_counted(rewards: list[float]) -> None:
    budget = RefillBudget(rounds=1, groups_per_step=2)
    with pytest.raises(InputError):
        budget.filtered(rewards)
    with pytest.raises(InputError):
        budget.kept(rewards)
    counts = budget.statistics()
    assert (counts.num_kept, counts.num_filtered, counts.num_in_a_row) == (0, 0, 0)


@pytest.mark.parametrize(("rounds", "groups"), [(0, 1), (1, 0)])
def test_a_budget_of_nothing_is_refused(rounds: int, groups: int) -> None:
    with pytest.raises(InputError, match="at least 1"):
        RefillBudget(rounds=rounds, groups_per_step=groups)


def _message(budget: RefillBudget, reward: float = 0.0) -> tuple[int, str]:
    with pytest.raises(NoProgressError) as caught:
        budget.filtered([reward])
    return budget.statistics().num_in_a_row, str(caught.value)
