"""Time as a parameter, so that every decision can be run under a fake clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """Reads time; never waits."""

    def monotonic(self) -> float:
        """Seconds that only grow; for deadlines."""
        ...

    def wall(self) -> float:
        """Unix time in seconds; for people and files."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
