"""Which requests of a scripted backend run, wait and end.

Invariants: at most `max_running` requests hold a slot; the others get theirs in the order they came; an abort reaches
every request that is inside, wherever it waits.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator


class RequestState:
    """One request in flight. `wake` is set whenever it may be able to go on."""

    def __init__(self) -> None:
        self.aborted = False
        self.wake = asyncio.Event()
        self.sleeping: asyncio.Future[None] | None = None

    def abort(self) -> None:
        """Make its generator end with what it has, even out of the middle of a sleep."""
        self.aborted = True
        self.wake.set()
        if self.sleeping is not None:
            self.sleeping.cancel()

    async def wait_until(self, may_go_on: Callable[[], bool]) -> None:
        """Wait until `may_go_on`, asked at every wake, or until aborted."""
        while not self.aborted and not may_go_on():
            self.wake.clear()
            await self.wake.wait()

    async def sleep(self, waiting: Awaitable[None]) -> None:
        """Wait for `waiting`, or until aborted."""
        self.sleeping = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait({self.sleeping})
        finally:
            self.sleeping.cancel()


class RequestSlots:
    """The slots of one backend and all requests that are inside."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._inside: dict[RequestState, None] = {}  # a set in order of arrival
        self._queue: deque[RequestState] = deque()
        self.num_running = 0

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._queue)

    @contextlib.contextmanager
    def enter(self) -> Generator[RequestState]:
        """Be inside, and so reachable for an abort, within a block."""
        state = RequestState()
        self._inside[state] = None
        try:
            yield state
        finally:
            del self._inside[state]

    @contextlib.asynccontextmanager
    async def slot(self, state: RequestState, stands_still: Callable[[], bool]) -> AsyncGenerator[None]:
        """Wait for a slot and hold it within a block; an aborted request goes in without one."""
        self._queue.append(state)
        try:
            await state.wait_until(
                lambda: self._queue[0] is state and self.num_running < self._max_running and not stands_still()
            )
        finally:
            self._queue.remove(state)
            self._wake_next()
        held = int(not state.aborted)
        self.num_running += held
        try:
            yield
        finally:
            self.num_running -= held
            self._wake_next()

    def abort_all(self) -> None:
        """End every request that is inside."""
        for state in self._inside:
            state.abort()

    def wake_all(self) -> None:
        """Let every request look again."""
        for state in self._inside:
            state.wake.set()

    def _wake_next(self) -> None:
        if self._queue:
            self._queue[0].wake.set()
