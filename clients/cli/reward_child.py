"""A reward server as a child process of a command, for as long as the command runs."""

import asyncio
import contextlib
import re
import sys
from collections.abc import Callable
from typing import Self

from headrace.engine.errors import DeadlineError, RewardError, UsageError

_ADDRESS = re.compile(r"serving .* on (\S+:\d+)")
_COMMAND = (sys.executable, "-m", "headrace.clients.cli.main", "reward", "serve")
_END_S = 5.0


class RewardChild:
    """`headrace reward serve module:function` in a process of its own.

    It cannot outlive this process: it ends when its standard input reaches the end. It is in a session of its own, so
    that Ctrl-C reaches the command alone and samples that run to their end can still be scored.
    """

    def __init__(self, process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> None:
        """Use `start`."""
        self.address = ""
        self._process = process
        self._on_line = on_line
        self._ending = False
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, function: str, *, timeout_s: float, on_line: Callable[[str], None]) -> Self:
        """Start the server and wait until it serves; cancelling the wait ends it.

        Args:
            function: `module:function`.
            timeout_s: Most seconds to wait.
            on_line: Gets what the server prints, line by line.

        Raises:
            UsageError: The function cannot be used.
            RewardError: The server ended before it served.
            DeadlineError: It does not serve in time.
        """
        process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            function,
            "--port",
            "0",
            "--watch-parent",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        child = cls(process, on_line)
        try:
            async with asyncio.timeout(timeout_s):
                child.address = await child._read_address(function)
        except TimeoutError as error:
            await child.end()
            raise DeadlineError(
                f"the reward server of {function} did not serve within {timeout_s:g} s: "
                "see what its module does when it is imported, or raise timeouts.start_s"
            ) from error
        except BaseException:
            await child.end()
            raise
        child._reading = asyncio.create_task(child._pass_on())
        return child

    async def end(self) -> None:
        """End the server: ask, wait for up to 5 s, then insist. May be called twice."""
        self._ending = True
        stdin = self._process.stdin
        assert stdin is not None
        stdin.close()
        if self._reading is None:
            self._reading = asyncio.create_task(self._pass_on())
        for insist in (None, self._process.terminate, self._process.kill):
            if insist is not None:
                with contextlib.suppress(ProcessLookupError):
                    insist()
            try:
                async with asyncio.timeout(_END_S):
                    await self._process.wait()
                break
            except TimeoutError:
                continue
        # What it still had to say; a process that it left behind may hold the pipe open for ever.
        await asyncio.wait({self._reading}, timeout=1.0)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read_address(self, function: str) -> str:
        last = ""
        while line := await self._read_line():
            found = _ADDRESS.search(line)
            if found is not None:
                return found[1]
            self._on_line(line)
            last = line.removeprefix("error: ")
        code = await self._process.wait()
        kind = UsageError if code == UsageError.exit_code else RewardError
        raise kind(f"the reward server of {function} did not start: {last or f'it ended with exit code {code}'}")

    async def _pass_on(self) -> None:
        # Read to the end, whether anybody looks or not: a full pipe would block the server.
        while line := await self._read_line():
            self._on_line(line)
        code = await self._process.wait()
        if not self._ending:
            self._on_line(f"it has ended with exit code {code}; samples get no more values")

    async def _read_line(self) -> str:
        """The next line that is not blank; empty at the end."""
        stdout = self._process.stdout
        assert stdout is not None
        while True:
            try:
                data = await stdout.readline()
            except ValueError:  # longer than the reader's limit; it has dropped what it held
                continue
            if not data:
                return ""
            line = data.decode("utf-8", "replace").strip()
            if line:
                return line
