"""The engine as a library: `async with Engine(config) as engine`.

A polite guest: it installs no signal handlers, replaces no event loop, seeds no global generator, configures no logging
and closes nothing that it did not open. The hub is a child process by default, so that blocking code of the host cannot
stall it.

Do not fork beside it: a forked child of a process that uses gRPC may crash or hang (`multiprocessing` has "spawn" and
"forkserver"). The engine is not harmed by one, and its own processes are spawned.
"""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc.aio

from headrace.clients.engine_publisher import EnginePublisher
from headrace.clients.run_events import event_from_proto
from headrace.engine.config import Config, check_config, effective_toml
from headrace.engine.errors import ActorLostError, DeadlineError, HeadraceError
from headrace.engine.hub.main import run_hub
from headrace.engine.hub.members import ROLE_NAMES
from headrace.engine.hub.waits import Wait
from headrace.engine.supervision.child import Child
from headrace.engine.supervision.guardian import Guardian
from headrace.engine.telemetry.events import RunEvent, RunResult, RunStatus
from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.status import error_from_rpc
from headrace.engine.transport.tensor_publisher import TensorLike
from headrace.v1 import control_pb2 as pb
from headrace.v1 import control_pb2_grpc

_CLOSING_S = 30.0  # for writing the timeline and closing files, beyond the grace period


class Engine:
    """One run. Enter it to start, `wait` for its end, leave it to stop and clean up.

    Args:
        config: A checked configuration; see `load_config`.
        resume: The folder of an earlier run to go on in, from its newest complete checkpoint.
    """

    def __init__(self, config: Config, *, resume: Path | None = None) -> None:
        self._config = config
        self._resume = resume
        self._started: asyncio.Event | None = None
        self._run_folder: Path | None = None
        self._guardian: Guardian | None = None
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._sockets: Path | None = None
        self._following: asyncio.Task[RunResult] | None = None
        self._failed_to_start = False
        self._publisher = EnginePublisher(config)

    @property
    def run_folder(self) -> Path:
        """Where the run writes; known once the engine is entered."""
        assert self._run_folder is not None, "enter the engine first"
        return self._run_folder

    @property
    def hub_address(self) -> str:
        """Where external ranks and workers of this host find the hub; known once the engine is entered."""
        assert self._sockets is not None, "enter the engine first"
        return f"unix:{self._sockets}/hub"

    async def __aenter__(self) -> Self:
        """Start the hub, which starts everything else; returns when it answers, before models are loaded.

        Raises:
            UsageError: The configuration cannot be used, or there is nothing to resume from.
            StorageError: The run folder cannot be written.
            DeadlineError: The hub did not answer within `timeouts.start_s`.
        """
        check_config(self._config)
        try:
            await self._start()
        except BaseException:
            self._failed_to_start = True
            self._start_event().set()
            await self.stop(0.0)
            raise
        self._start_event().set()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None, /
    ) -> None:
        await self.stop()

    async def wait(self) -> RunResult:
        """Wait until the run has ended by itself or was stopped, and its files are written. Cancelling is harmless."""
        assert self._following is not None, "enter the engine first"
        result = await asyncio.shield(self._following)
        await self._hub_gone(self._config.timeouts.stop_s + _CLOSING_S)
        return result

    async def stop(self, grace_s: float | None = None) -> None:
        """End the run, its processes and everything that this object opened. May be called twice.

        Args:
            grace_s: Seconds for what is running; `timeouts.stop_s` by default.
        """
        grace = self._config.timeouts.stop_s if grace_s is None else grace_s
        await self._ask_to_stop(grace)
        if self._child is not None:
            await self._child.stop(0.0 if grace == 0.0 else _CLOSING_S)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._following is not None:
            await asyncio.wait({self._following}, timeout=1.0)
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        self._publisher.close()
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()
        self._keep_log()
        if self._guardian is not None:
            guardian, self._guardian = self._guardian, None
            await asyncio.to_thread(guardian.close)

    async def publish(self, tensors: Mapping[str, TensorLike], version: int) -> bool:
        """Publish weights that were trained elsewhere; see `TrainerClient.publish_tensors` for arguments and errors.

        Waits until the hub has them. Cancelling does not withdraw them: a thread sends them to the end.
        """
        if self._channel is None:
            raise ActorLostError("the run was stopped; no weights are taken any more")
        return await self._publisher.publish(self._stub(), self.hub_address, tensors, version)

    async def events(self) -> AsyncIterator[RunEvent]:
        """All events from now on; ends after the status that says how the run ended. May be read before entering."""
        await self._start_event().wait()
        if self._failed_to_start or self._channel is None:
            return
        call = self._stub().Watch(pb.WatchRequest())
        try:
            async for message in call:
                event = event_from_proto(message)
                if event is not None:
                    yield event
        except grpc.aio.AioRpcError:
            return  # the hub is gone; `wait` says why
        finally:
            call.cancel()

    async def why(self) -> list[Wait]:
        """Who waits for what, on whom; `since_s` and `deadline_s` are seconds from now.

        Raises:
            ActorLostError: The hub is gone.
        """
        if self._channel is None:
            raise ActorLostError("the run was stopped; nobody waits any more")
        try:
            reply = await self._stub().Why(pb.WhyRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, "asking who waits for what") from error
        return [
            Wait(
                role=ROLE_NAMES.get(wait.role, "hub"),
                member=wait.member_id,
                waits_for=wait.waits_for,
                on_whom=wait.on_whom,
                since_s=-wait.since_s,
                deadline_s=wait.deadline_s,
            )
            for wait in reply.waits
        ]

    # Inner workings

    async def _start(self) -> None:
        self._sockets = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="headrace-"))
        address = f"unix:{self._sockets}/hub"
        if self._config.run.hub == "process":
            self._guardian = Guardian()
            self._guardian.remove(self._sockets)
            arguments = {
                "config_toml": effective_toml(self._config),
                "address": address,
                "resume": "" if self._resume is None else str(self._resume.absolute()),
            }
            self._child = Child.spawn(
                "hub", "headrace.engine.hub.main:main", arguments, guardian=self._guardian, log_folder=self._sockets
            )
        else:
            self._task = asyncio.create_task(run_hub(self._config, address, self._resume), name="headrace hub")
        self._channel = open_channel(address)
        status = await self._first_status()
        self._run_folder = Path(status.run_folder)
        self._following = asyncio.create_task(self._follow(), name="headrace engine")

    async def _first_status(self) -> pb.GetStatusResponse:
        """Wait for the hub's first answer, or for its end."""

        async def ask() -> pb.GetStatusResponse:
            limit_s = self._config.timeouts.start_s
            return await self._stub().GetStatus(pb.GetStatusRequest(), timeout=limit_s, wait_for_ready=True)

        asking = asyncio.create_task(ask())
        ending = asyncio.create_task(self._hub_ended())
        try:
            await asyncio.wait({asking, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise ending.result()
            return asking.result()
        except grpc.aio.AioRpcError as error:
            raise DeadlineError(
                f"the hub did not answer within timeouts.start_s = {self._config.timeouts.start_s:g}"
            ) from error
        finally:
            asking.cancel()
            ending.cancel()
            await asyncio.gather(asking, ending, return_exceptions=True)

    async def _hub_ended(self) -> HeadraceError:
        """Wait for the hub's process or task to end; the error that it ended with."""
        if self._child is not None:
            await self._child.wait()
            return self._child.why_it_ended()
        assert self._task is not None
        await asyncio.wait({self._task})
        error = None if self._task.cancelled() else self._task.exception()
        return error if isinstance(error, HeadraceError) else ActorLostError(f"the hub ended: {error!r}")

    async def _follow(self) -> RunResult:
        """The end of the run, as the hub tells it, or as its death does."""
        last = RunStatus(step=0, num_steps=self._config.run.steps)
        async for event in self.events():
            if isinstance(event, RunStatus):
                last = event
                if event.ended:
                    return RunResult(steps=event.step, ended=event.ended, error=event.error)
        reason = str(await self._hub_ended())
        if self._sockets is not None and self._run_folder is not None:  # where the log will be by then
            reason = reason.replace(str(self._sockets / "hub.log"), str(self._run_folder / "logs" / "hub.log"))
        return RunResult(steps=last.step, ended="failed", error=reason)

    async def _hub_gone(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._hub_ended()

    async def _ask_to_stop(self, grace_s: float) -> None:
        """An orderly end: the hub is asked, and has the grace period and the time to write its files."""
        if self._channel is None or self._following is None:
            return
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._stub().Stop(pb.StopRequest(reason="asked to"), timeout=5)
            if grace_s > 0:
                await self._hub_gone(grace_s + _CLOSING_S)

    def _keep_log(self) -> None:
        """Move the hub's log into the run folder and remove our own."""
        sockets, self._sockets = self._sockets, None
        if sockets is None:
            return
        if self._run_folder is not None and (sockets / "hub.log").exists():
            with contextlib.suppress(OSError):
                shutil.copyfile(sockets / "hub.log", self._run_folder / "logs" / "hub.log")
        shutil.rmtree(sockets, ignore_errors=True)

    def _start_event(self) -> asyncio.Event:
        if self._started is None:
            self._started = asyncio.Event()
        return self._started

    def _stub(self) -> "control_pb2_grpc.ControlServiceAsyncStub":
        assert self._channel is not None, "enter the engine first"
        return control_pb2_grpc.ControlServiceStub(self._channel)
