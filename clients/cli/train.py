"""`headrace train CONFIG [--resume RUN_FOLDER] [--reward-server module:function] [--section.key=value ...]`."""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Protocol, TextIO, cast

from msgspec.structs import replace

from headrace.clients.cli.display import Display, choose_display
from headrace.clients.cli.display_state import DisplayState, figure
from headrace.clients.cli.reward_child import RewardChild
from headrace.clients.cli.stop_signals import StopSignals
from headrace.engine.config import Config, check_config, read_config
from headrace.engine.errors import HeadraceError, UsageError
from headrace.engine.telemetry.events import RunEvent, RunResult
from headrace.engine.telemetry.timeline import SPANS_FILE, load_spans

EXIT_INTERRUPTED = 130
_ADDRESS_TO_COME = "grpc://127.0.0.1:1"  # stands in for the server's address while the configuration is checked
_LAST_EVENTS_S = 2.0


class RunEngine(Protocol):
    """What this command needs of `headrace.clients.engine.Engine`."""

    @property
    def run_folder(self) -> Path:
        """Known once the engine is entered."""
        ...

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None, /
    ) -> bool | None: ...

    def events(self) -> AsyncIterator[RunEvent]:
        """All events; read from before the engine is entered, so that loading is seen too."""
        ...

    async def wait(self) -> RunResult: ...

    async def stop(self, grace_s: float) -> None: ...


class EngineFactory(Protocol):
    """Makes an engine that is not started yet."""

    def __call__(self, config: Config, *, resume: Path | None = None) -> RunEngine: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG", help="a TOML file; with --resume the run's own by default"
    )
    parser.add_argument("--resume", type=Path, metavar="RUN_FOLDER", help="go on with an earlier run")
    parser.add_argument(
        "--reward-server",
        metavar="MODULE:FUNCTION",
        help="serve this reward from a process of its own for as long as the run goes on, and use it",
    )


def run(args: argparse.Namespace, engine_factory: EngineFactory | None = None, stream: TextIO | None = None) -> int:
    """Train until the steps are done, and show how it goes. Blocks all the while; runs an event loop of its own.

    Ctrl-C or SIGTERM stops the run in an orderly way, within `timeouts.stop_s`; a second one stops it at once.

    Args:
        args: Of `add_arguments`, with `overrides`, a list of `--section.key=value`.
        engine_factory: Makes the engine; None takes the shipped one.
        stream: Where to show the run; None is standard output.

    Returns:
        0 when the run finished; 1 when it failed; 130 when a signal stopped it.

    Raises:
        UsageError: The configuration, the run folder or the reward function cannot be used; nothing was started.
        RunError: The engine could not be started, or was lost.
    """
    config = _configuration(args)
    factory = engine_factory or cast(EngineFactory, import_module("headrace.clients.engine").Engine)
    out = stream or sys.stdout
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_train(args, config, factory, out))


def _configuration(args: argparse.Namespace) -> Config:
    path: Path | None = args.config
    if path is None:
        if args.resume is None:
            raise UsageError("headrace train needs a configuration: give a TOML file, or --resume RUN_FOLDER")
        path = args.resume / "config.toml"
    overrides: Sequence[str] = args.overrides
    config = read_config(path, overrides)
    if args.reward_server is not None:
        config = _with_address(config, _ADDRESS_TO_COME)
    check_config(config)
    return config


def _with_address(config: Config, address: str) -> Config:
    return replace(config, reward=replace(config.reward, function="", address=address))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _train(args: argparse.Namespace, config: Config, factory: EngineFactory, out: TextIO) -> int:
    display = choose_display(out)
    server: RewardChild | None = None
    with StopSignals() as signals:
        display.open(
            DisplayState(started_s=time.time(), num_steps=config.run.steps, model=Path(config.model.path).name)
        )
        try:
            if args.reward_server is not None:
                server = await _start_server(args.reward_server, config, display, signals)
                if server is None:
                    return EXIT_INTERRUPTED
                config = _with_address(config, f"grpc://{server.address}")
            driver = _Driver(factory(config, resume=args.resume), display, signals, config.timeouts.stop_s)
            try:
                result = await driver.drive()
            finally:
                display.close()
                if driver.run_folder is not None:
                    _summarise(driver.run_folder, display.state, out)
        finally:
            display.close()
            if server is not None:
                await server.end()
    return _exit_code(result, signals)


async def _start_server(function: str, config: Config, display: Display, signals: StopSignals) -> RewardChild | None:
    """The server, ready; None when a stop signal came first."""
    starting = asyncio.create_task(
        RewardChild.start(
            function, timeout_s=config.timeouts.start_s, on_line=lambda line: display.note(f"reward server: {line}")
        )
    )
    signal = asyncio.create_task(signals.first.wait())
    await asyncio.wait({starting, signal}, return_when=asyncio.FIRST_COMPLETED)
    signal.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
    return None if starting.cancelled() else starting.result()


def _exit_code(result: RunResult | None, signals: StopSignals) -> int:
    if result is not None and (result.ended == "failed" or result.error):
        print(f"error: {result.error or 'the run failed'}", file=sys.stderr)
        return 1
    if signals.first.is_set() and (result is None or result.ended != "finished"):
        return EXIT_INTERRUPTED
    return 0


class _Driver:
    """Runs one engine from start to end.

    One task enters, waits for and leaves the engine; one shows its events; one turns signals into `stop`.
    """

    def __init__(self, engine: RunEngine, display: Display, signals: StopSignals, grace_s: float) -> None:
        self.run_folder: Path | None = None
        self._engine = engine
        self._display = display
        self._signals = signals
        self._grace_s = grace_s

    async def drive(self) -> RunResult | None:
        """How the run ended; None when a signal ended it before it had started."""
        watching = asyncio.create_task(self._watch())
        living = asyncio.create_task(self._live())
        stopping = asyncio.create_task(self._stop_on_signal(living))
        try:
            await asyncio.wait({living})
            if not living.cancelled():
                await asyncio.wait({watching}, timeout=_LAST_EVENTS_S)
        finally:
            left = [task for task in (stopping, watching, living) if not task.done()]
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)
        if living.cancelled():
            return None
        result = living.result()
        for task in (stopping, watching):
            if not task.cancelled():
                task.result()  # a defect there did not end the run, but must not go unseen
        return result

    async def _live(self) -> RunResult:
        async with self._engine:
            self.run_folder = self._engine.run_folder
            self._display.locate(self.run_folder)
            return await self._engine.wait()

    async def _watch(self) -> None:
        async for event in self._engine.events():
            self._display.show(event)

    async def _stop_on_signal(self, living: "asyncio.Task[RunResult]") -> None:
        signals = self._signals
        await signals.first.wait()
        if self.run_folder is None:
            self._display.note(f"{signals.last_name}: stopping before the run has started")
            living.cancel()
            return
        again = "press Ctrl-C" if signals.last_name == "SIGINT" else "send the signal"
        self._display.note(
            f"{signals.last_name}: stopping; running work has {self._grace_s:g} s to end; {again} again to stop at once"
        )
        orderly = asyncio.create_task(self._engine.stop(self._grace_s))
        second = asyncio.create_task(signals.second.wait())
        try:
            await asyncio.wait({orderly, second}, return_when=asyncio.FIRST_COMPLETED)
            if not orderly.done():
                self._display.note(f"{signals.last_name}: stopping at once")
                await self._engine.stop(0.0)
            await orderly
        finally:
            second.cancel()
            orderly.cancel()


def _summarise(run_folder: Path, state: DisplayState, out: TextIO) -> None:
    """Print where everything is; draw the picture of the run on the way."""
    first, last = state.first_eval, state.last_eval
    if first is not None and last is not None and first.step == last.step:
        print(f"eval       after step {last.step}: {last.text()}", file=out)
    elif first is not None and last is not None:
        print(
            f"eval       accuracy {figure(first.accuracy)} -> {figure(last.accuracy)}, "
            f"reward {figure(first.reward)} -> {figure(last.reward)} (step {first.step} -> {last.step})",
            file=out,
        )
    if state.step:
        print(f"overlap    {_draw(run_folder)}", file=out)
    print(f"run folder {run_folder}", file=out)
    has_checkpoint = any((run_folder / "checkpoints").glob("step-*"))
    if state.ended in ("stopped", "failed") and state.step < state.num_steps and has_checkpoint:
        print(f"to go on   headrace train --resume {run_folder}", file=out)
    out.flush()


def _draw(run_folder: Path) -> str:
    """Draw overlap.svg; says where it is, or in one sentence why there is none."""
    path = run_folder / "overlap.svg"
    try:
        from headrace.clients.cli.picture import draw_overlap

        fraction = draw_overlap(load_spans(run_folder / SPANS_FILE), path)
    except ImportError as error:
        return f"overlap.svg was not drawn: {error.name or 'matplotlib'} is not installed"
    except HeadraceError as error:
        return f"overlap.svg was not drawn: {error}"
    return f"{path} (sampling ran during {fraction:.0%} of the step time shown)"
