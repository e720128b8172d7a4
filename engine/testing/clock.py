"""Time that stands still until a test moves it."""

import asyncio
import heapq
import itertools

# Rounds of the event loop after which tasks that only pass results on to each other have come to rest.
_SETTLE_ROUNDS = 25


class FakeClock:
    """A `Clock` whose time moves only by `advance`, and an asynchronous `sleep` that follows it.

    Sleepers wake in the order of their due times, each at its own time, so that code under test reads the same times
    on every run.
    """

    def __init__(self, monotonic: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        """Start at `monotonic` seconds, at the Unix time `wall`."""
        self._monotonic = monotonic
        self._offset = wall - monotonic
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        """Seconds that only grow."""
        return self._monotonic

    def wall(self) -> float:
        """Unix time in seconds."""
        return self._monotonic + self._offset

    @property
    def num_sleepers(self) -> int:
        """Tasks that wait in `sleep` now."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has moved by `seconds`; with 0 or less, let other tasks run once."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._monotonic + seconds, next(self._order), future))
        await future

    def advance(self, seconds: float) -> None:
        """Move the time and wake the sleepers that are due; they run when the caller next awaits.

        A sleeper that goes to sleep again on waking counts from the new time; `run_for` keeps exact times.
        """
        assert seconds >= 0, "time does not go backwards"
        target = self._monotonic + seconds
        while self._sleepers and self._sleepers[0][0] <= target:
            self._wake_first()
        self._monotonic = target

    async def run_for(self, seconds: float) -> None:
        """Move the time from sleeper to sleeper and let each run, then stop `seconds` later than now."""
        target = self._monotonic + seconds
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= target:
            self._wake_first()
            await self._settle()
        self._monotonic = target

    def _wake_first(self) -> None:
        due, _, future = heapq.heappop(self._sleepers)
        self._monotonic = max(self._monotonic, due)
        if not future.done():  # a cancelled sleeper left its entry
            future.set_result(None)

    async def _settle(self) -> None:
        for _ in range(_SETTLE_ROUNDS):
            await asyncio.sleep(0)
