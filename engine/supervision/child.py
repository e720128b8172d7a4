"""A spawned child process: its own process group, a pipe that tells it of our death, a log file."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine import errors
from headrace.engine.errors import ActorLostError, HeadraceError, StorageError
from headrace.engine.supervision.bootstrap import ChildError
from headrace.engine.supervision.guardian import Guardian

_TAIL_BYTES = 16_384


class Child:
    """One child and everything below it. Children are spawned, never forked: a forked gRPC channel hangs.

    The child leads a process group; ending the child ends the group, so that nothing it started is left.
    """

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], guardian: Guardian, log_path: Path, reason: int
    ) -> None:
        """Use `spawn`. `reason` is the reading end of the pipe through which the child says why it ended."""
        self.name = name
        self.log_path = log_path
        self._process = process
        self._guardian = guardian
        self._exited = asyncio.Event()
        self._reason = reason
        self._said = b""
        loop = asyncio.get_running_loop()
        guardian.watch(process.pid)
        threading.Thread(target=self._reap, args=(loop,), name=f"reap-{name}", daemon=True).start()

    @classmethod
    def spawn(
        cls,
        name: str,
        target: str,
        arguments: Mapping[str, Any],
        *,
        guardian: Guardian,
        log_folder: Path,
        env: Mapping[str, str] | None = None,
    ) -> "Child":
        """Start `python -m headrace.engine.supervision.bootstrap target arguments`; does not wait for it.

        Args:
            name: Names the log file and messages.
            target: `module:function`, called with `arguments` as keywords.
            arguments: JSON types.
            env: Added to our own environment.

        Raises:
            StorageError: The log file cannot be written.
        """
        log_path = log_folder / f"{name}.log"
        command = [sys.executable, "-m", "headrace.engine.supervision.bootstrap", target]
        command.append(msgspec.json.encode(dict(arguments)).decode())
        reason, reason_end = os.pipe()
        os.set_blocking(reason, False)
        command.append(str(reason_end))
        try:
            with log_path.open("ab") as log_file:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log_file,
                    stderr=log_file,
                    process_group=0,
                    pass_fds=(reason_end,),
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                )
        except OSError as error:
            os.close(reason)
            raise StorageError(f"cannot start {name} with its log in {log_path}: {error.strerror}") from error
        finally:
            os.close(reason_end)
        return cls(name, process, guardian, log_path, reason)

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.returncode if self._exited.is_set() else None

    async def wait(self) -> int:
        """Wait until the child has ended and its group is gone; returns the exit status. Cancelling is harmless."""
        await self._exited.wait()
        return self._process.returncode

    async def stop(self, grace_s: float) -> int:
        """Ask with SIGTERM, wait up to `grace_s` seconds, then kill the group. May be called twice."""
        if not self._exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), grace_s)
        self.kill()
        return await self.wait()

    def kill(self) -> None:
        """Kill the whole group now. Harmless once it has ended."""
        if not self._exited.is_set():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def why_it_ended(self) -> HeadraceError:
        """The error that the child named, or one that quotes the end of its log."""
        with contextlib.suppress(msgspec.DecodeError):  # nothing was said, or killed half-way
            said = msgspec.json.decode(self._said, type=ChildError)
            kind = getattr(errors, said.kind, errors.RunError)
            return kind(said.message)
        status = self._process.returncode
        how = (
            f"by signal {signal.Signals(-status).name}"
            if status is not None and status < 0
            else f"with status {status}"
        )
        last = next((line for line in reversed(self._log_tail()) if line.strip()), "nothing was logged")
        return ActorLostError(f"{self.name} ended {how}; its last words in {self.log_path}: {last.strip()[:300]}")

    def _log_tail(self) -> list[str]:
        try:
            with self.log_path.open("rb") as log_file:
                log_file.seek(max(0, self.log_path.stat().st_size - _TAIL_BYTES))
                return log_file.read().decode(errors="replace").splitlines()
        except OSError:
            return []

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        # WNOWAIT leaves the number taken while the rest of the group is killed: it cannot be someone else's yet.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(OSError):
            self._said = os.read(self._reason, 1 << 16)
        os.close(self._reason)
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            loop.call_soon_threadsafe(self._ended)

    def _ended(self) -> None:
        self._guardian.forget(self.pid)
        self._exited.set()
