"""Clients of the hub's ControlService: asyncio for actors, blocking for learner ranks."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import grpc
import grpc.aio
import msgspec

from headrace.engine.clock import Clock, SystemClock
from headrace.engine.config import Config, load_config
from headrace.engine.errors import HeadraceError
from headrace.engine.transport.channel import open_blocking_channel
from headrace.engine.transport.convert import version_from_proto
from headrace.engine.transport.status import error_from_rpc
from headrace.engine.types import PolicyVersion
from headrace.v1 import control_pb2 as pb
from headrace.v1 import control_pb2_grpc

Reply = TypeVar("Reply")

HEARTBEAT_S = 1.0
_CALL_S = 30.0


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one track between two moments (Unix time), for the timeline."""

    track: str
    name: str
    start_s: float
    end_s: float


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """What the hub tells a new member."""

    run_id: str
    incarnation: int
    config: Config
    version: PolicyVersion
    fencing_token: int
    resume_from: str
    run_folder: str
    payload_dir: str
    agent_address: str = ""


class Progress:
    """What a member's heartbeats say. Its own loop moves it; the heartbeat only reads. Safe across threads."""

    def __init__(self, on_news: Callable[[], None] = lambda: None) -> None:
        """`on_news` is called after `say` and after a change of phase, so that a heartbeat can go at once."""
        self._on_news = on_news
        self.phase: pb.Phase.ValueType = pb.PHASE_STARTING
        self.count = 0
        self.doing = ""
        self.event_loop_lag_s = 0.0
        self._notes: list[str] = []

    def say(self, note: str) -> None:
        """Tell people something; goes with a heartbeat, at once."""
        self._notes.append(note)
        self._on_news()

    def take_notes(self) -> str:
        """What was said since the last call, one line."""
        notes, self._notes = self._notes, []
        return "; ".join(notes)

    def moved(self, doing: str, phase: "pb.Phase.ValueType | None" = None) -> None:
        """Something got done; from now on the member does `doing`. A change of phase is told at once."""
        self.count += 1
        self.doing = doing
        if phase is not None and phase != self.phase:
            self.phase = phase
            self._on_news()


def join_request(role: "pb.Role.ValueType", member_id: str, rank: int, address: str) -> pb.JoinRequest:
    return pb.JoinRequest(
        role=role, member_id=member_id, rank=rank, pid=os.getpid(), host=socket.gethostname(), address=address
    )


def joined(reply: pb.JoinResponse) -> Joined:
    return Joined(
        run_id=reply.run_id,
        incarnation=reply.incarnation,
        config=load_config(None, text=reply.config_toml),
        version=version_from_proto(reply.version),
        fencing_token=reply.fencing_token,
        resume_from=reply.resume_from,
        run_folder=reply.run_folder,
        payload_dir=reply.payload_dir,
        agent_address=reply.agent_address,
    )


def heartbeat(role: "pb.Role.ValueType", member_id: str, progress: Progress) -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(
        member_id=member_id,
        phase=progress.phase,
        progress=progress.count,
        event_loop_lag_s=progress.event_loop_lag_s,
        wait=pb.Wait(role=role, member_id=member_id, waits_for=progress.doing),
        note=progress.take_notes(),
    )


def report_request(
    member_id: str, step: int, spans: Sequence[Span], metrics: dict[str, float], error: str
) -> pb.ReportRequest:
    wire = [pb.TimelineSpan(track=s.track, name=s.name, start_s=s.start_s, end_s=s.end_s) for s in spans]
    return pb.ReportRequest(member_id=member_id, step=step, spans=wire, metrics=metrics, error=error)


class ControlClient:
    """A member's line to the hub, for code on an event loop."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        role: "pb.Role.ValueType",
        member_id: str,
        *,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._stub: control_pb2_grpc.ControlServiceAsyncStub = control_pb2_grpc.ControlServiceStub(channel)
        self._role = role
        self._heartbeat_s = heartbeat_s
        self.member_id = member_id
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the heartbeats, while they go
        self._news = asyncio.Event()
        self.progress = Progress(self._wake)

    async def join(self, rank: int = 0, address: str = "") -> Joined:
        """Join the run; waits for the hub for at most 30 s.

        Raises:
            ActorLostError: The hub is not reachable.
            ConfigError: The hub's configuration is not understood here.
        """
        request = join_request(self._role, self.member_id, rank, address)
        try:
            return joined(await self._stub.Join(request, timeout=_CALL_S, wait_for_ready=True))
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, "joining the run") from error

    async def heartbeats(self) -> None:
        """Send a heartbeat every `heartbeat_s`, and one with news at once, until the hub says stop; then returns.

        Cancelling ends it sooner.

        Raises:
            ActorLostError: The hub is gone.
        """
        self._loop = asyncio.get_running_loop()
        try:
            await self._beat(self._loop)
        finally:
            self._loop = None

    async def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            self._news.clear()
            try:
                reply = await self._stub.Heartbeat(
                    heartbeat(self._role, self.member_id, self.progress), timeout=_CALL_S
                )
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error, "sending a heartbeat to the hub") from error
            if reply.stop:
                return
            before = loop.time()
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._news.wait()
            except TimeoutError:
                self.progress.event_loop_lag_s = loop.time() - before - self._heartbeat_s

    def _wake(self) -> None:
        """Let the next heartbeat go now; from any thread. Before the first one there is nothing to wake."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._news.set)

    async def report(
        self, *, step: int = 0, spans: Sequence[Span] = (), metrics: dict[str, float] | None = None, error: str = ""
    ) -> None:
        """Hand timeline spans and metrics to the hub.

        Raises:
            ActorLostError: The hub is gone.
        """
        try:
            await self._stub.Report(report_request(self.member_id, step, spans, metrics or {}, error), timeout=_CALL_S)
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure, "reporting to the hub") from failure

    async def leave(self, reason: str) -> None:
        """Say goodbye; a hub that is gone already is no error."""
        try:
            await self._stub.Leave(pb.LeaveRequest(member_id=self.member_id, reason=reason), timeout=2)
        except grpc.aio.AioRpcError:
            return


class BlockingControlClient:
    """A learner rank's line to the hub; heartbeats come from a thread of its own."""

    def __init__(
        self,
        address: str,
        role: "pb.Role.ValueType",
        member_id: str,
        clock: Clock | None = None,
        *,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._channel = open_blocking_channel(address)
        self._stub = control_pb2_grpc.ControlServiceStub(self._channel)
        self._role = role
        self._clock = clock or SystemClock()
        self._heartbeat_s = heartbeat_s
        self.member_id = member_id
        self._closing = threading.Event()
        self._wake = threading.Event()
        self.progress = Progress(self._wake.set)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def join(self, rank: int) -> Joined:
        """Join the run; blocks for at most 30 s. Heartbeats begin.

        Raises:
            ActorLostError: The hub is not reachable.
        """
        request = join_request(self._role, self.member_id, rank, "")
        reply = self._call(lambda: self._stub.Join(request, timeout=_CALL_S, wait_for_ready=True), "joining the run")
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()
        return joined(reply)

    def report(self, *, step: int, spans: Sequence[Span], metrics: dict[str, float]) -> None:
        """Hand timeline spans and metrics to the hub; blocks for one round trip.

        Raises:
            ActorLostError: The hub is gone.
        """
        request = report_request(self.member_id, step, spans, metrics, "")
        self._call(lambda: self._stub.Report(request, timeout=_CALL_S), "reporting to the hub")

    def checkpoint_state(self, step: int, fencing_token: int) -> str:
        """The hub's part of a checkpoint that covers `step` steps, as JSON.

        Raises:
            FencedError: A successor has taken over.
        """
        request = pb.GetCheckpointStateRequest(step=step, fencing_token=fencing_token)
        reply = self._call(lambda: self._stub.GetCheckpointState(request, timeout=_CALL_S), "saving the hub's state")
        return reply.state_json

    def close(self) -> None:
        """Leave and close the channel. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=_CALL_S)
        self._channel.close()

    def _beat(self) -> None:
        while not self._closing.is_set():
            try:
                self._stub.Heartbeat(heartbeat(self._role, self.member_id, self.progress), timeout=_CALL_S)
            except grpc.RpcError:
                return  # the main thread's next call to the hub fails with the reason
            self._wake.wait(self._heartbeat_s)
            self._wake.clear()

    @staticmethod
    def _call(call: Callable[[], Reply], doing: str) -> Reply:
        try:
            return call()
        except grpc.RpcError as error:
            failure: HeadraceError = error_from_rpc(error, doing)
            raise failure from error
