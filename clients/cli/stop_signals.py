"""Ctrl-C and SIGTERM of a command that runs an event loop of its own.

The first signal asks for an orderly stop, the second for a quick one; after that the signals have their usual effect,
so that a third ends the process whatever the program does.
"""

import asyncio
import signal
from types import TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Counts stop signals while it is entered. For the main thread of a command; a library has no business with it."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.last_name = ""
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        """Take over the signals of the running loop."""
        self._loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._receive, number)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Give the signals back."""
        self._release()

    def _receive(self, number: signal.Signals) -> None:
        self.last_name = number.name
        if not self.first.is_set():
            self.first.set()
            return
        self.second.set()
        self._release()

    def _release(self) -> None:
        if self._loop is not None:
            for number in _SIGNALS:
                self._loop.remove_signal_handler(number)
            self._loop = None
