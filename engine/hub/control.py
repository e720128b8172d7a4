"""The hub's ControlService: membership, progress, why, watching and stopping."""

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import grpc.aio
import msgspec
from google.protobuf.timestamp_pb2 import Timestamp

from headrace.engine.config import effective_toml
from headrace.engine.errors import FencedError, HeadraceError, UsageError
from headrace.engine.hub.members import ROLE_NAMES, Member
from headrace.engine.hub.state import HubState
from headrace.engine.telemetry.events import Activity, LogLine, MetricsRow, RunEvent, RunStatus
from headrace.engine.telemetry.metric_keys import declared
from headrace.engine.transport.control import Span
from headrace.engine.transport.convert import version_to_proto
from headrace.v1 import control_pb2 as pb
from headrace.v1 import control_pb2_grpc

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[object, object]

_ROLE_NUMBERS = {name: number for number, name in ROLE_NAMES.items()}


class ControlHub(control_pb2_grpc.ControlServiceServicer):
    """Serves members and those who look after the run.

    Args:
        state: Of the run.
        checkpoint_state: The hub's part of a checkpoint that covers so many steps, as JSON types.
    """

    def __init__(self, state: HubState, checkpoint_state: Callable[[int], dict[str, object]]) -> None:
        self._state = state
        self._checkpoint_state = checkpoint_state

    # Members

    async def Join(self, request: pb.JoinRequest, context: "Context") -> pb.JoinResponse:
        state = self._state
        if request.role not in ROLE_NAMES or not request.member_id:
            raise UsageError(
                f"a member joins with a role and a member_id; got {request.role} and {request.member_id!r}"
            )
        now_s, wall_s = state.clock.monotonic(), state.clock.wall()
        member = Member(
            member_id=request.member_id,
            role=ROLE_NAMES[request.role],
            rank=request.rank,
            pid=request.pid,
            host=request.host,
            heard_s=now_s,
            moved_s=now_s,
            doing_since_s=wall_s,
        )
        state.members.join(member)
        self._tell(member)
        return pb.JoinResponse(
            run_id=state.run_id,
            incarnation=state.version.incarnation,
            config_toml=effective_toml(state.config),
            version=version_to_proto(state.version),
            fencing_token=state.fencing_token,
            resume_from=state.resume_from,
            run_folder=str(state.reporting.folder.path),
            payload_dir=state.payload_dir,
            agent_address=state.agent_address,
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: "Context") -> pb.HeartbeatResponse:
        state = self._state
        if state.members.beat(request, state.clock.monotonic(), state.clock.wall()):
            self._tell(state.members.get(request.member_id))
        if request.note:
            state.reporting.say(request.note)
        return pb.HeartbeatResponse(stop=bool(state.ended))

    async def Leave(self, request: pb.LeaveRequest, context: "Context") -> pb.LeaveResponse:
        member = self._state.members.leave(request.member_id)
        if member is not None:
            member.doing = ""
            self._tell(member)
        return pb.LeaveResponse()

    async def Report(self, request: pb.ReportRequest, context: "Context") -> pb.ReportResponse:
        state = self._state
        for name in request.metrics:  # before anything counts: a trainer of one's own may have figures of its own
            declared(name)
        spans = [Span(track=s.track, name=s.name, start_s=s.start_s, end_s=s.end_s) for s in request.spans]
        state.reporting.spans(spans)
        if request.step:
            try:
                self._finish_step(request.step, dict(request.metrics))
            except HeadraceError as error:  # the disk, which is the run's trouble and not the learner's
                state.end("failed", error)
                raise
        return pb.ReportResponse()

    def _finish_step(self, step: int, metrics: dict[str, float]) -> None:
        state = self._state
        stats = state.train.stats()
        parts = state.reporting.parts
        parts.add("off_policy/in_queue", state.flow.num_ready())
        parts.add("off_policy/in_flight", state.flow.num_in_flight())
        parts.add("buffer/records", stats.num_records)
        parts.add("buffer/bytes", stats.num_bytes)
        tokens = state.tokens_by_step.pop(step, 0)
        state.reporting.finish_step(step, metrics, tokens)
        state.reporting.status(state.status())

    def _tell(self, member: Member) -> None:
        self._state.reporting.activity(
            Activity(role=member.role, member=member.rank, doing=member.doing, since_s=member.doing_since_s)
        )

    # Those who look after the run

    async def Why(self, request: pb.WhyRequest, context: "Context") -> pb.WhyResponse:
        state = self._state
        waits = [
            pb.Wait(
                role=_ROLE_NUMBERS.get(wait.role, pb.ROLE_HUB),
                member_id=wait.member,
                waits_for=wait.waits_for,
                on_whom=wait.on_whom,
                since_s=state.clock.monotonic() - wait.since_s,
                deadline_s=wait.deadline_s - state.clock.monotonic(),
            )
            for wait in state.board.listing()
        ]
        reply = pb.WhyResponse(waits=waits)
        if request.group_id:
            ledger = state.flow.ledger
            found = ledger.state(request.group_id)
            history = "; ".join(
                f"{event.state.name.lower()} {event.detail}" for event in ledger.history(request.group_id)
            )
            reply.group.CopyFrom(
                pb.GroupState(
                    group_id=request.group_id,
                    state=found.name.lower(),
                    attempt=ledger.attempt(request.group_id),
                    detail=history,
                )
            )
        return reply

    async def GetStatus(self, request: pb.GetStatusRequest, context: "Context") -> pb.GetStatusResponse:
        return self._status(self._state.status())

    async def Watch(self, request: pb.WatchRequest, context: "Context") -> AsyncIterator[pb.WatchResponse]:
        """Events from now on; ends after the status that says how the run ended."""
        reporting = self._state.reporting
        queue = reporting.watch()
        try:
            status = self._state.status()
            yield self._event(status)
            for member in self._state.members.all():
                self._tell(member)
            while not status.ended:
                event = await queue.get()
                yield self._event(event)
                if isinstance(event, RunStatus):
                    status = event
        finally:
            reporting.unwatch(queue)

    async def Stop(self, request: pb.StopRequest, context: "Context") -> pb.StopResponse:
        self._state.reporting.say(f"stopping: {request.reason or 'asked to'}")
        self._state.end("stopped")
        return pb.StopResponse()

    async def GetCheckpointState(
        self, request: pb.GetCheckpointStateRequest, context: "Context"
    ) -> pb.GetCheckpointStateResponse:
        state = self._state
        if request.fencing_token < state.fencing_token:
            raise FencedError(f"token {request.fencing_token} has been taken over by {state.fencing_token}")
        if request.step != state.flow.window.step:
            raise FencedError(f"a checkpoint of step {request.step} was asked for; {state.flow.window.step} is current")
        text = msgspec.json.encode(self._checkpoint_state(request.step)).decode()
        return pb.GetCheckpointStateResponse(state_json=text)

    def _status(self, status: RunStatus) -> pb.GetStatusResponse:
        state = self._state
        return pb.GetStatusResponse(
            run_id=state.run_id,
            step=status.step,
            num_steps=status.num_steps,
            version=version_to_proto(state.version),
            ended=status.ended,
            error=status.error or "",
            error_kind="" if state.error is None else type(state.error).__name__,
            run_folder=str(state.reporting.folder.path),
            model=status.model,
            backend=status.backend,
            num_in_flight=status.groups_in_flight or 0,
            num_ready=status.groups_ready or 0,
            fencing_token=state.fencing_token,
            payload_dir=state.payload_dir,
        )

    def _event(self, event: RunEvent) -> pb.WatchResponse:
        time = Timestamp()
        time.FromMicroseconds(int(self._state.clock.wall() * 1e6))
        match event:
            case MetricsRow():
                return pb.WatchResponse(time=time, metrics_json=msgspec.json.encode(event).decode())
            case LogLine():
                return pb.WatchResponse(time=time, log_line=event.text)
            case RunStatus():
                return pb.WatchResponse(time=time, status=self._status(event))
            case Activity():
                activity = pb.Activity(
                    role=_ROLE_NUMBERS.get(event.role, pb.ROLE_HUB),
                    rank=event.member,
                    doing=event.doing,
                    since_s=event.since_s,
                )
                return pb.WatchResponse(time=time, activity=activity)
