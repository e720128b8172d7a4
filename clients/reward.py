"""Write a reward server in five lines. Needs the core installation alone.

    from headrace.clients.reward import serve

    def score(prompt, response, data):
        return float(response.strip() == data["answer"])

    if __name__ == "__main__":
        serve(score, "0.0.0.0:50051")

The function runs in worker processes, so one that hangs or crashes costs one sample. `docs/rewards.md` says what it
may take and return.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from headrace.engine.errors import UsageError
from headrace.engine.plugins import load_object
from headrace.engine.transport.reward import RewardServicer
from headrace.engine.transport.server import GrpcServer
from headrace.engine.types import RewardOutcome, RewardSample, RewardStatus

__all__ = ["RewardOutcome", "RewardSample", "RewardServer", "RewardStatus", "batched", "serve"]

Function = TypeVar("Function", bound=Callable[..., Any])


def batched(function: Function) -> Function:
    """Decorator: the function takes a `list[RewardSample]` and returns a list with one result a sample, in order."""
    function.batch = True  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
    return function


class _Pool(Protocol):
    """What this module uses of `headrace.actors.reward.pool.RewardPool`, which it may not import."""

    @property
    def capacity(self) -> int: ...

    async def start(self) -> None: ...

    async def score(self, batch: Sequence[RewardSample]) -> list[RewardOutcome]: ...

    def outcomes(self, batch: Sequence[RewardSample]) -> AsyncGenerator[tuple[int, RewardOutcome], None]: ...

    async def close(self) -> None: ...


class RewardServer:
    """A scoring function behind a gRPC server; for programs that run an event loop of their own.

    It installs no signal handlers and ends nothing but its own workers.
    """

    def __init__(
        self,
        function: Callable[..., Any] | str,
        address: str = "127.0.0.1:0",
        *,
        num_workers: int = 2,
        timeout_s: float = 30.0,
        name: str = "",
    ) -> None:
        """Prepare a server; nothing is started yet.

        Args:
            function: A function at the top level of a module or script, or its name: `module:function` or
                `file.py:function`.
            address: `HOST:PORT` (port 0 takes a free one) or `unix:/PATH`.
            num_workers: Worker processes.
            timeout_s: Longest time for one sample; its worker is killed and replaced then.
            name: What the server calls itself; by default the function's name.

        Raises:
            UsageError: The function is nested, a lambda or typed in interactively: a worker cannot import it.
            ConfigError: The address is malformed or a number is not positive.
        """
        spec = function if isinstance(function, str) else spec_of(function)
        make_pool = cast(Callable[..., _Pool], load_object("headrace.actors.reward.pool:RewardPool"))
        self.name = name or spec
        self._pool = make_pool(spec, num_workers=num_workers, timeout_s=timeout_s)
        self._address = address
        self._servicer: RewardServicer | None = None
        self._server: GrpcServer | None = None

    async def start(self) -> str:
        """Import the function in all workers, then listen; returns the address. Call it once.

        Raises:
            ConfigError: The function cannot be imported or used, or the address is taken.
        """
        try:
            await self._pool.start()
            self._servicer = RewardServicer(self._pool, name=self.name, max_concurrency=self._pool.capacity)
            self._server = GrpcServer([self._servicer.service()], self._address)
            return await self._server.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, then end the workers. May be called twice."""
        if self._server is not None:
            await self._server.stop(grace_s)
        await self.abort()

    async def abort(self) -> None:
        """End the workers now; running calls are answered, with ERROR for what is unfinished."""
        await self._pool.close()
        if self._servicer is not None:
            await self._servicer.close()


def serve(
    function: Callable[..., Any] | str,
    address: str = "127.0.0.1:0",
    *,
    num_workers: int = 2,
    timeout_s: float = 30.0,
    grace_s: float = 10.0,
    port_file: Path | None = None,
    watch_parent: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT; blocks. Prints `serving NAME on HOST:PORT` when calls are taken.

    The first signal refuses new calls and gives running ones `grace_s` seconds; a second one ends them at once. Call it
    from the main thread of a program of its own; `RewardServer` is for others.

    Args:
        function: See `RewardServer`.
        address: See `RewardServer`.
        num_workers: See `RewardServer`.
        timeout_s: See `RewardServer`.
        grace_s: Seconds that running calls get at the end.
        port_file: Receives the address, whole or not at all, when calls are taken.
        watch_parent: Also end when standard input reaches its end, that is, with the program that started this one.

    Raises:
        UsageError: See `RewardServer`; or a script calls this while a worker imports it.
        ConfigError: See `RewardServer`.
    """
    if os.environ.get("HEADRACE_REWARD_WORKER"):
        raise UsageError('serve() ran while a worker imported the script; put it below if __name__ == "__main__":')
    server = RewardServer(function, address, num_workers=num_workers, timeout_s=timeout_s)
    asyncio.run(_serve(server, grace_s, port_file, watch_parent))


async def _serve(server: RewardServer, grace_s: float, port_file: Path | None, watch_parent: bool) -> None:
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    def on_orphaned() -> None:
        hurry.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if watch_parent:
        _call_at_end_of_stdin(loop, on_orphaned)
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(server.start())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        bound = starting.result().removeprefix("grpc://")
        if port_file is not None:
            _write_whole(port_file, bound + "\n")
        print(f"serving {server.name} on {bound}", flush=True)
        await stopping
    else:
        starting.cancel()
        await asyncio.wait({starting})
    ending = asyncio.create_task(server.stop(0.0 if hurry.is_set() else grace_s))
    hurrying = asyncio.create_task(hurry.wait())
    await asyncio.wait({ending, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    if not ending.done():
        await server.abort()  # running calls are answered now, so the server stops
    await ending
    hurrying.cancel()
    stopping.cancel()


def spec_of(function: Callable[..., Any]) -> str:
    """How a worker process finds the function: `module:function`, or `file.py:function` for one of a script.

    Raises:
        UsageError: Another process cannot import it.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or not name or "<" in name:
        raise UsageError(
            f"{function!r} cannot be imported by a worker process; give a function at the top level of a module"
        )
    if module != "__main__":
        return f"{module}:{name}"
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None:
        raise UsageError(f"{name} was typed in interactively, so a worker process cannot import it; put it in a file")
    main_spec = getattr(main, "__spec__", None)
    return f"{main_spec.name if main_spec else file}:{name}"  # the former where it was run by python -m


def _call_at_end_of_stdin(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    def watch() -> None:
        with contextlib.suppress(OSError):  # no standard input at all: there is nobody to watch
            while os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop is closed: it is over anyway
            loop.call_soon_threadsafe(callback)

    threading.Thread(target=watch, name="headrace-parent-watch", daemon=True).start()


def _write_whole(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    unfinished.write_text(text)
    unfinished.replace(path)
