"""One worker process, as its pool sees it."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence

from headrace.actors.reward.frames import Form, Hello, Scored, Setup, Task, pack, read_frame
from headrace.engine.errors import ConfigError, FormatError, RunError
from headrace.engine.types import RewardOutcome, RewardSample


class WorkerLostError(RunError):
    """A worker ended, or sent what is not a frame, before it had answered."""


class WorkerProcess:
    """A running worker. It does one task at a time; after a failure, a timeout or a cancellation it must be killed."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        form: Form,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.form: Form = form
        self.pid = process.pid

    @classmethod
    async def start(cls, setup: Setup, start_timeout_s: float) -> "WorkerProcess":
        """Spawn a worker and wait until it has imported the function; cancelling ends it.

        Raises:
            ConfigError: The function cannot be imported or has an unusable signature.
            WorkerLostError: The process ended before it was ready, or was not ready in time.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C on the terminal does not reach it, and its children can be ended with it.
            process = subprocess.Popen(  # noqa: ASYNC220  # a few milliseconds; needs no child watcher
                [sys.executable, "-m", "headrace.actors.reward.worker"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        worker = cls(process, reader, writer, "sync")
        try:
            async with asyncio.timeout(start_timeout_s):
                await worker._write(pack(setup))
                hello = await read_frame(reader, Hello)
        except TimeoutError as error:
            await worker.kill()
            raise WorkerLostError(
                f"a worker for reward.function {setup.function!r} was not ready within {start_timeout_s:g} s"
            ) from error
        except (EOFError, ConnectionError, FormatError) as error:
            how = await worker.kill()
            raise WorkerLostError(
                f"a worker for reward.function {setup.function!r} ended while it was starting ({how})"
            ) from error
        except BaseException:
            await worker.kill()
            raise
        if hello.error:
            await worker.kill()
            raise ConfigError(hello.error)
        worker.form = hello.form
        return worker

    async def score(self, samples: Sequence[RewardSample]) -> AsyncGenerator[tuple[int, RewardOutcome], None]:
        """Yield (index, outcome) once for each sample, in the order they are ready.

        Raises:
            WorkerLostError: The worker ended or sent something else; samples not yet yielded have no outcome.
        """
        missing = set(range(len(samples)))
        try:
            await self._write(pack(Task(samples=list(samples))))
            while missing:
                scored = await read_frame(self._reader, Scored)
                if scored.index not in missing:
                    raise FormatError(f"a reward worker answered sample number {scored.index}, which was not asked")
                missing.discard(scored.index)
                yield scored.index, scored.outcome
        except (EOFError, ConnectionError) as error:
            raise WorkerLostError("the worker process ended") from error
        except FormatError as error:
            raise WorkerLostError(str(error)) from error

    async def kill(self) -> str:
        """End the worker and what it started, at once, and reap it; says how it ended. May be called twice."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # where it was exiting already, its own status stays
        self._writer.close()
        # After SIGKILL this is a matter of milliseconds; a thread, because waiting for a child blocks.
        status = await asyncio.shield(asyncio.to_thread(self._process.wait))
        await self._close_stream()
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    async def close(self, grace_s: float) -> None:
        """Let an idle worker run its exit handlers for up to `grace_s`, then kill it."""
        await self._close_stream()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, grace_s)
        await self.kill()

    async def _write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def _close_stream(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
