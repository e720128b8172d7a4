import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.errors import ConfigError
from headrace.engine.scheduling.retry import BreakerState, CircuitBreaker, Deadline, RestartBudget, RetryPolicy


def test_a_deadline_counts_down_to_nothing_and_the_earlier_of_two_wins() -> None:
    deadline = Deadline.after(10.0, 5.0)
    assert deadline.remaining(12.0) == 3.0 and deadline.remaining(99.0) == 0.0
    assert not deadline.expired(14.9) and deadline.expired(15.0)
    assert Deadline.earliest(deadline, Deadline()) == deadline
    assert Deadline().remaining(1e9) == math.inf


@given(
    attempt=st.integers(0, 100),
    seed=st.integers(0, 1000),
    left=st.floats(0, 20),
    jitter=st.floats(0, 1),
)
def test_reward_server_5xx_a_delay_is_bounded_by_backoff_and_never_reaches_the_deadline(
    attempt: int, seed: int, left: float, jitter: float
) -> None:
    policy = RetryPolicy(retries=8, base_s=0.5, max_s=10.0, jitter=jitter)
    delay = policy.next_delay(attempt, random.Random(seed), 100.0, Deadline.after(100.0, left))
    if attempt >= 8:
        assert delay is None
    elif delay is not None:
        ceiling = min(10.0, 0.5 * 2**attempt)
        assert (1 - jitter) * ceiling - 1e-9 <= delay <= ceiling
        assert delay < left
    elif jitter == 0:
        assert min(10.0, 0.5 * 2**attempt) >= Deadline.after(100.0, left).remaining(100.0)


def test_reward_server_5xx_full_jitter_spreads_callers_over_the_whole_range() -> None:
    policy = RetryPolicy(retries=1, base_s=1.0, max_s=1.0)
    drawn = [policy.next_delay(0, random.Random(seed), 0.0, Deadline()) or 0.0 for seed in range(200)]
    assert min(drawn) < 0.1 and max(drawn) > 0.9


@pytest.mark.parametrize("wrong", [{"retries": -1}, {"base_s": -1.0}, {"base_s": 5.0, "max_s": 1.0}, {"jitter": 2.0}])
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RetryPolicy(**wrong)  # type: ignore[arg-type]


def test_reward_server_5xx_a_breaker_opens_probes_once_and_closes() -> None:
    breaker = CircuitBreaker(failures=2, open_s=10.0)
    for now in (0.0, 1.0):
        ticket = breaker.acquire(now)
        assert ticket is not None
        breaker.failed(ticket, now)
    assert breaker.state(1.0) is BreakerState.OPEN and breaker.retry_at() == 11.0
    assert breaker.acquire(10.9) is None
    assert breaker.state(11.0) is BreakerState.HALF_OPEN
    probe = breaker.acquire(11.0)
    assert probe is not None
    assert breaker.acquire(11.0) is None  # one at a time
    breaker.failed(probe, 12.0)
    assert breaker.acquire(21.9) is None
    probe = breaker.acquire(22.0)
    assert probe is not None
    breaker.succeeded(probe)
    assert breaker.state(22.0) is BreakerState.CLOSED and breaker.retry_at() is None


def test_the_result_of_a_call_from_before_says_nothing_about_a_breaker_that_has_opened_since() -> None:
    breaker = CircuitBreaker(failures=1, open_s=1.0)
    old, other = breaker.acquire(0.0), breaker.acquire(0.0)
    assert old is not None and other is not None
    breaker.failed(old, 0.0)
    breaker.succeeded(other)
    assert breaker.state(0.5) is BreakerState.OPEN
    assert breaker.acquire(1.0) is not None
    breaker.succeeded(other)
    breaker.failed(other, 1.0)
    assert breaker.state(1.0) is BreakerState.HALF_OPEN


def test_a_cancelled_probe_makes_room_for_another() -> None:
    breaker = CircuitBreaker(failures=1, open_s=0.0)
    first = breaker.acquire(0.0)
    assert first is not None
    breaker.failed(first, 0.0)
    probe = breaker.acquire(0.0)
    assert probe is not None and breaker.acquire(0.0) is None
    breaker.cancelled(probe)
    assert breaker.acquire(0.0) is not None


def test_a_success_in_between_starts_the_count_of_failures_again() -> None:
    breaker = CircuitBreaker(failures=2)
    for outcome in ("fail", "pass", "fail"):
        ticket = breaker.acquire(0.0)
        assert ticket is not None
        if outcome == "fail":
            breaker.failed(ticket, 0.0)
        else:
            breaker.succeeded(ticket)
    assert breaker.state(0.0) is BreakerState.CLOSED
    with pytest.raises(ConfigError):
        CircuitBreaker(failures=0)


def test_a_restart_budget_backs_off_is_spent_and_recovers() -> None:
    budget = RestartBudget(3, 60.0, base_s=1.0, max_s=3.0)
    assert [budget.next_delay(0.0) for _ in range(4)] == [1.0, 2.0, 3.0, None]
    assert budget.next_delay(60.5) is None
    assert budget.next_delay(61.0) == 3.0  # the first has left the window, two still count
    assert budget.used(500.0) == 0
    assert budget.next_delay(500.0) == 1.0
    with pytest.raises(ConfigError):
        RestartBudget(1, 0.0)


@given(st.lists(st.floats(0, 10), max_size=60))
def test_no_window_ever_holds_more_restarts_than_the_budget(gaps: list[float]) -> None:
    budget = RestartBudget(3, 20.0, base_s=0.0, max_s=0.0)
    now, granted = 0.0, list[float]()
    for gap in gaps:
        now += gap
        if budget.next_delay(now) is not None:
            granted.append(now)
        assert sum(now - 20.0 < at <= now for at in granted) <= 3
