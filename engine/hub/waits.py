"""Waiting with a deadline and a reason.

Invariants:
- Every wait of the hub goes through `Changes.wait_until`, so each has a deadline and is on the board while it lasts.
- Nobody polls: a waiter sleeps until something changes or its deadline comes.
"""

import asyncio
import contextlib
from collections.abc import Callable, Generator

import msgspec

from headrace.engine.clock import Clock
from headrace.engine.errors import DeadlineError


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Who waits, for what, on whom and since when.

    Attributes:
        role: "learner", "rollout", "reward" or "hub".
        member: Which one of them.
        waits_for: What would end the wait, in words.
        on_whom: Who has to act; may be empty when nobody in particular.
        since_s: Monotonic seconds of the hub's clock.
        deadline_s: Monotonic seconds; infinity where another deadline bounds the wait from outside.
    """

    role: str
    member: str
    waits_for: str
    on_whom: str = ""
    since_s: float = 0.0
    deadline_s: float = float("inf")


class WaitBoard:
    """The waits that are going on right now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next = 0
        self._waits: dict[int, Wait] = {}

    @contextlib.contextmanager
    def waiting(self, wait: Wait) -> Generator[None]:
        """List `wait`, stamped with the time, for the length of the block."""
        key, self._next = self._next, self._next + 1
        self._waits[key] = msgspec.structs.replace(wait, since_s=self._clock.monotonic())
        try:
            yield
        finally:
            del self._waits[key]

    def listing(self) -> list[Wait]:
        """Oldest first."""
        return sorted(self._waits.values(), key=lambda wait: wait.since_s)


class Changes:
    """Wakes waiters when the state they look at may have changed. For one event loop."""

    def __init__(self, clock: Clock, board: WaitBoard) -> None:
        self._clock = clock
        self._board = board
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Something changed; every waiter looks again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_until(self, condition: Callable[[], bool], wait: Wait) -> None:
        """Return as soon as `condition` holds; it is looked at once per change. Cancelling leaves nothing behind.

        The condition may raise to end the wait with an error.

        Raises:
            DeadlineError: `wait.deadline_s` passed first; the message is the wait in words.
        """
        if condition():
            return
        with self._board.waiting(wait):
            while True:
                changed = self._changed
                left_s = wait.deadline_s - self._clock.monotonic()
                timeout_s = None if left_s == float("inf") else max(0.0, left_s)
                try:
                    await asyncio.wait_for(changed.wait(), timeout_s)
                except TimeoutError:
                    whom = f" from {wait.on_whom}" if wait.on_whom else ""
                    raise DeadlineError(
                        f"{wait.role} {wait.member} waited in vain for {wait.waits_for}{whom}"
                    ) from None
                if condition():
                    return
