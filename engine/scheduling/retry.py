"""Deadlines, retries with jitter, a circuit breaker and a restart budget: when to try again, and when to stop.

Times are seconds of a monotonic clock and are passed in, like the random generator. Invariants:

1. No delay reaches past a deadline: the answer is None where no time would be left to try.
2. A breaker that is open lets nothing through until `open_s` has passed, then at most `probes` calls at a time, and
   closes on the first of them that succeeds. A result counts only for the phase in which its call began.
3. A restart budget grants at most `max_restarts` in any stretch of `window_s`.
"""

import enum
import math
import random
from collections import deque
from dataclasses import dataclass

from headrace.engine.errors import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    """A point in monotonic time, in seconds; infinity for none."""

    at_s: float = math.inf

    @classmethod
    def after(cls, now_s: float, seconds: float) -> "Deadline":
        """The deadline `seconds` from now."""
        return cls(now_s + seconds)

    def remaining(self, now_s: float) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.at_s - now_s)

    def expired(self, now_s: float) -> bool:
        """Whether no time is left."""
        return now_s >= self.at_s

    @staticmethod
    def earliest(first: "Deadline", second: "Deadline") -> "Deadline":
        """The one that comes first."""
        return min(first, second)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Bounded retries with exponential backoff and jitter (Brooker, "Exponential Backoff And Jitter", 2015).

    The delay before retry n (from 0) is drawn evenly from [(1 - jitter) * c, c] with c = min(max_s, base_s * 2**n), so
    jitter 1 is the article's "full jitter": callers that failed together do not come back together.

    Attributes:
        retries: Tries after the first.
        base_s: Largest delay before the first retry.
        max_s: Largest delay at all.
        jitter: The random part of a delay, 0 to 1.
    """

    retries: int = 3
    base_s: float = 0.2
    max_s: float = 10.0
    jitter: float = 1.0

    def __post_init__(self) -> None:
        if self.retries < 0 or not 0 <= self.jitter <= 1 or not 0 <= self.base_s <= self.max_s < math.inf:
            raise ConfigError(
                f"{self} is not allowed: retries must be at least 0, jitter between 0 and 1, and 0 <= base_s <= max_s"
            )

    def next_delay(self, attempt: int, rng: random.Random, now_s: float, deadline: Deadline) -> float | None:
        """Seconds to wait before the next try; None if there shall be none.

        Args:
            attempt: Retries made so far; 0 after the first try has failed.
            rng: Draws the jitter; one number a call, if the answer is not None for want of retries.
            now_s: Now.
            deadline: No try begins at or after it.
        """
        if attempt >= self.retries:
            return None
        ceiling = min(self.max_s, self.base_s * 2.0 ** min(attempt, 60))
        delay = ceiling * (1.0 - self.jitter * (1.0 - rng.random()))
        return delay if delay < deadline.remaining(now_s) else None


class BreakerState(enum.StrEnum):
    """CLOSED lets calls through, OPEN none, HALF_OPEN a few to see."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Keeps calls from a service that is down, so that retries do not multiply its load.

    Each call takes a ticket with `acquire` and gives it back with exactly one of `succeeded`, `failed` and `cancelled`.

    Args:
        failures: Failures in a row that open the breaker.
        open_s: How long it stays open.
        probes: Calls at a time while half open.
    """

    def __init__(self, failures: int = 5, open_s: float = 10.0, probes: int = 1) -> None:
        if failures < 1 or open_s < 0 or probes < 1:
            raise ConfigError(
                f"a breaker with failures {failures}, open_s {open_s} and probes {probes} was given; failures and "
                "probes must be at least 1 and open_s at least 0"
            )
        self._limit = failures
        self._open_s = open_s
        self._max_probes = probes
        self._phase = 0  # a new one at each change of state; a ticket is the phase in which it was taken
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._probing = 0
        self._retry_at_s = 0.0

    def state(self, now_s: float) -> BreakerState:
        """What the breaker would do with a call now."""
        if self._state is BreakerState.OPEN and now_s >= self._retry_at_s:
            return BreakerState.HALF_OPEN
        return self._state

    def retry_at(self) -> float | None:
        """When an open breaker lets a call through again; None when it is not open."""
        return self._retry_at_s if self._state is BreakerState.OPEN else None

    def acquire(self, now_s: float) -> int | None:
        """A ticket for one call; None if it must not be made now."""
        if self.state(now_s) is BreakerState.HALF_OPEN and self._state is BreakerState.OPEN:
            self._enter(BreakerState.HALF_OPEN)
        if self._state is BreakerState.OPEN:
            return None
        if self._state is BreakerState.HALF_OPEN:
            if self._probing >= self._max_probes:
                return None
            self._probing += 1
        return self._phase

    def succeeded(self, ticket: int) -> None:
        """The call got an answer; closes a half-open breaker."""
        if ticket != self._phase:
            return
        self._failures = 0
        if self._state is BreakerState.HALF_OPEN:
            self._enter(BreakerState.CLOSED)

    def failed(self, ticket: int, now_s: float) -> None:
        """The call failed; opens a half-open breaker, and a closed one after `failures` in a row."""
        if ticket != self._phase:
            return
        self._failures += 1
        if self._state is BreakerState.HALF_OPEN or self._failures >= self._limit:
            self._enter(BreakerState.OPEN)
            self._retry_at_s = now_s + self._open_s

    def cancelled(self, ticket: int) -> None:
        """The call was given up by its caller; says nothing about the service."""
        if ticket == self._phase and self._state is BreakerState.HALF_OPEN:
            self._probing -= 1

    def _enter(self, state: BreakerState) -> None:
        self._phase += 1
        self._state = state
        self._failures = self._probing = 0


class RestartBudget:
    """How often and how soon a supervisor restarts a child: exponential backoff within a budget.

    Args:
        max_restarts: Restarts in any `window_s`; one more is refused.
        window_s: How long a restart counts.
        base_s: Delay before the first restart in a window; it doubles with each further one.
        max_s: Largest delay.
    """

    def __init__(
        self, max_restarts: int = 5, window_s: float = 300.0, *, base_s: float = 0.5, max_s: float = 30.0
    ) -> None:
        if max_restarts < 0 or window_s <= 0 or not 0 <= base_s <= max_s:
            raise ConfigError(
                f"a restart budget of {max_restarts} in {window_s} s with delays of {base_s} to {max_s} s was given; "
                "the first must be at least 0, the window above 0, and 0 <= base_s <= max_s"
            )
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._base_s = base_s
        self._max_s = max_s
        self._granted: deque[float] = deque()  # when the granted restarts take place

    def used(self, now_s: float) -> int:
        """Restarts that still count."""
        while self._granted and self._granted[0] <= now_s - self._window_s:
            self._granted.popleft()
        return len(self._granted)

    def next_delay(self, now_s: float) -> float | None:
        """Take a restart out of the budget; seconds to wait before it, or None if the budget is spent."""
        used = self.used(now_s)
        if used >= self._max_restarts:
            return None
        delay = min(self._max_s, self._base_s * 2.0 ** min(used, 60))
        self._granted.append(now_s + delay)
        return delay
