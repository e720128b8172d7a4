"""How late an event loop is: the figure that shows blocking code before it shows as lost heartbeats."""

import asyncio
from collections.abc import Awaitable, Callable

from headrace.engine.clock import Clock


class LoopLag:
    """Measures the lag of the loop that `run` runs on; the metric `event_loop_lag_s`.

    It starts nothing itself: the owner makes a task of `run()` and cancels it in the end. A few wake-ups a second cost
    less than a thousandth of a core.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        interval_s: float = 0.25,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._sleep = sleep
        self._worst_s = 0.0
        self._due_s: float | None = None

    async def run(self) -> None:
        """Measure until cancelled; never returns."""
        while True:
            self._due_s = self._clock.monotonic() + self._interval_s
            await self._sleep(self._interval_s)
            self._worst_s = max(self._worst_s, self._late_s())

    def take(self) -> float:
        """The worst lag since the last call, seconds; then starts anew.

        A wake-up that is overdue at this very moment counts as late by what it is overdue, so that a long stall is told
        by the first reader after it, whichever task runs first, and told once.
        """
        late_s = self._late_s()
        worst_s = max(self._worst_s, late_s)
        self._worst_s = 0.0
        if self._due_s is not None:
            self._due_s += late_s
        return worst_s

    def _late_s(self) -> float:
        if self._due_s is None:
            return 0.0
        return max(0.0, self._clock.monotonic() - self._due_s)
