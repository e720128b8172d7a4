from headrace.engine.config import Config
from headrace.engine.errors import NoProgressError, RewardError
from headrace.engine.hub.streak import FailureStreak, prompts_ran_out
from headrace.engine.types import DropReason


def test_two_steps_of_groups_without_a_reward_end_the_run_with_the_last_reason() -> None:
    streak = FailureStreak(groups_per_step=5)
    for number in range(9):
        streak.failed(f"reason {number}")
        assert streak.dropped(DropReason.REWARD_FAILED) is None
    streak.failed("the last reason")
    error = streak.dropped(DropReason.REWARD_FAILED)
    assert isinstance(error, RewardError)
    assert "10 groups in a row got no reward: the last reason" in str(error)


def test_a_group_that_was_scored_ends_the_streak() -> None:
    streak = FailureStreak(groups_per_step=1)
    for _ in range(20):
        for _ in range(7):
            assert streak.dropped(DropReason.ROLLOUT_FAILED) is None
        streak.succeeded()


def test_long_prompts_are_given_more_patience_and_stale_groups_do_not_count() -> None:
    streak = FailureStreak(groups_per_step=1)
    assert all(streak.dropped(DropReason.STALE) is None for _ in range(2000))
    ends = [streak.dropped(DropReason.PROMPT_TOO_LONG) for _ in range(1000)]
    assert ends[:-1] == [None] * 999
    assert isinstance(ends[-1], NoProgressError)


def test_prompts_that_ran_out_tell_how_many_came_to_nothing() -> None:
    plain = str(prompts_ran_out(Config(), 3, 1, {}))
    assert plain.startswith("the prompts ran out after 3 of ") and "with 1 groups left" in plain
    assert "came to nothing" not in plain and "dynamic_sampling" not in plain
    filtered = str(prompts_ran_out(Config(), 3, 1, {DropReason.ZERO_VARIANCE: 7, DropReason.STALE: 2}))
    assert "7 zero_variance, 2 stale" in filtered and 'set algorithm.dynamic_sampling = "off"' in filtered
