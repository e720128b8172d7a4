"""The hub's side of the rollout workers: one Work stream each, groups out, endings in.

consumes    endings, capacities and serving versions from workers
produces    groups and cancellations for workers
waits for   nothing by itself: `pump` is called after every change
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

import grpc.aio

from headrace.engine.errors import HeadraceError, UsageError
from headrace.engine.hub.evaluation import EvalFlow
from headrace.engine.hub.flow import Ended
from headrace.engine.hub.scoring import Stored
from headrace.engine.hub.state import HubState
from headrace.engine.records import decode_trajectory
from headrace.engine.transport.convert import group_to_proto, version_from_proto
from headrace.engine.types import DropReason, PolicyVersion, PromptGroup
from headrace.v1 import rollout_pb2 as pb
from headrace.v1 import rollout_pb2_grpc

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[pb.WorkRequest, pb.WorkResponse]

log = logging.getLogger(__name__)

_GROUP_GRACE_S = 10.0  # a worker ends an overdue group by itself; the hub steps in this much later


class Rollouts(rollout_pb2_grpc.RolloutServiceServicer):
    """Dispatches groups of the training window and of evaluations.

    Invariants:
    - A worker has one stream; a second one of the same name takes over, and the groups of the first begin anew.
    - A group is handed to scoring once per attempt, after its records are in the table.
    """

    def __init__(
        self,
        state: HubState,
        evals: EvalFlow,
        *,
        on_generated: Callable[[PromptGroup], None],
        on_ended: Callable[[list[Ended]], None],
    ) -> None:
        self._state = state
        self._evals = evals
        self._on_generated = on_generated
        self._on_ended = on_ended
        self._outboxes: dict[str, asyncio.Queue[pb.WorkResponse | None]] = {}
        self._capacities: dict[str, int] = {}
        self._serving: dict[str, PolicyVersion] = {}
        self._due_s: dict[tuple[str, int], float] = {}
        self._spans: dict[tuple[str, int], int] = {}
        self._tracks: dict[str, int] = {}

    def serving(self) -> dict[str, PolicyVersion]:
        """The version that each connected worker's engine serves."""
        return dict(self._serving)

    # The stream

    async def Work(
        self, request_iterator: AsyncIterator[pb.WorkRequest], context: "Context"
    ) -> AsyncIterator[pb.WorkResponse]:
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.worker_id:
            raise UsageError("a Work stream begins with a message that names its worker_id")
        worker = first.worker_id
        outbox: asyncio.Queue[pb.WorkResponse | None] = asyncio.Queue()
        if worker in self._outboxes:
            self._outboxes[worker].put_nowait(None)
            self._lose(worker)
        self._outboxes[worker] = outbox
        reading: asyncio.Task[None] | None = None
        try:
            self._take(worker, first)
            reading = asyncio.create_task(self._read(worker, request_iterator, outbox), name=f"work of {worker}")
            while (command := await outbox.get()) is not None:
                yield command
        finally:
            if reading is not None:
                reading.cancel()
            if self._outboxes.get(worker) is outbox:
                del self._outboxes[worker]
                self._lose(worker)

    async def _read(
        self,
        worker: str,
        requests: AsyncIterator[pb.WorkRequest],
        outbox: asyncio.Queue[pb.WorkResponse | None],
    ) -> None:
        try:
            async for request in requests:
                self._take(worker, request)
        except HeadraceError as error:
            log.error("the messages of %s made no sense: %s", worker, error)
            self._state.end("failed", error)
        finally:
            outbox.put_nowait(None)

    def _take(self, worker: str, request: pb.WorkRequest) -> None:
        """One message of a worker."""
        self._state.members.asked(worker, self._state.clock.monotonic())
        match request.WhichOneof("event"):
            case "capacity":
                self._capacities[worker] = request.capacity
            case "serving":
                self._serving[worker] = version_from_proto(request.serving)
            case "group_ended":
                self._group_ended(worker, request.group_ended)
            case None:
                pass
        self._enlist(worker)
        self.pump()

    def _enlist(self, worker: str) -> None:
        """Keep both queues in step with what the worker says."""
        version, capacity = self._serving.get(worker), self._capacities.get(worker)
        if version is None or capacity is None:
            return
        per_group = self._state.config.schedule.group_size
        self._state.flow.enlist(worker, max(1, capacity // per_group), version)
        self._evals.enlist(worker, capacity, version)

    # Groups out

    def pump(self) -> None:
        """Send every group that can go now. Evaluations go first: they are short, and a step may wait for them."""
        state = self._state
        if state.ended:
            return
        while (group := self._evals.next_dispatch()) is not None:
            self._send(group.worker, group.group)
        while (dispatch := state.flow.next_dispatch()) is not None:
            self._send(dispatch.worker, dispatch.group)

    def _send(self, worker: str, group: PromptGroup) -> None:
        limit_s = self._state.config.rollout.request_timeout_s + _GROUP_GRACE_S
        self._due_s[group.group_id, group.attempt] = self._state.clock.monotonic() + limit_s
        track = f"rollout {self._tracks.setdefault(worker, len(self._tracks))}"
        span = self._state.reporting.timeline.begin(track, group.group_id, self._state.clock.wall())
        self._spans[group.group_id, group.attempt] = span
        self._outboxes[worker].put_nowait(pb.WorkResponse(group=group_to_proto(group)))

    def cancel(self, ended: list[Ended]) -> None:
        """Tell workers to stop what has no use any more."""
        for end in ended:
            for key in [key for key in self._spans if key[0] == end.outcome.group_id]:
                self._settle(*key)
            outbox = self._outboxes.get(end.worker or "")
            if outbox is not None:
                outbox.put_nowait(pb.WorkResponse(cancel_group_id=end.outcome.group_id))

    def drain(self) -> None:
        """Ask every worker to finish what it runs and leave."""
        for worker, outbox in self._outboxes.items():
            self._state.flow.drain(worker)
            outbox.put_nowait(pb.WorkResponse(drain=True))

    # Groups in

    def _group_ended(self, worker: str, ended: pb.GroupEnded) -> None:
        self._settle(ended.group_id, ended.attempt)
        flow = self._state.flow
        if self._evals.owns(ended.group_id):
            group = self._evals.ended(ended.group_id, ended.attempt, ended.status == pb.GroupEnded.STATUS_GENERATED)
            if group is not None:
                self._on_generated(group)
            self._state.changed()  # the step that is held back begins with the last answer, not with the last reward
            return
        if not flow.is_current(ended.group_id, ended.attempt):
            return
        group = flow.group(ended.group_id)
        assert group is not None
        match ended.status:
            case pb.GroupEnded.STATUS_GENERATED:
                self._generated(group)
            case pb.GroupEnded.STATUS_PROMPT_TOO_LONG:
                if self._state.config.rollout.overlong_prompt == "fail":
                    self._state.end("failed", UsageError(ended.message))
                else:
                    self._state.attempt_failed(group, ended.message)
                    self._on_ended(flow.drop(group.group_id, group.attempt, DropReason.PROMPT_TOO_LONG))
            case _:
                self._again(group, ended.message or f"aborted by {worker}")

    def _generated(self, group: PromptGroup) -> None:
        records: Sequence[Stored] = ()
        with contextlib.suppress(UsageError):  # raised where not one of them was accepted
            records = self._state.train.table.records_of(group.group_id)
        spans = [decode_trajectory(record.data).spans for record in records]
        if len(records) != group.group_size:
            self._again(group, f"only {len(records)} of {group.group_size} records were accepted")
        elif self._state.flow.generated(group.group_id, group.attempt, spans):
            self._state.progressed()
            self._on_generated(group)

    def _again(self, group: PromptGroup, why: str) -> None:
        """Begin a group anew, or end it when it has had all its attempts."""
        self._state.attempt_failed(group, why)
        ended = self._state.flow.requeue(group.group_id, group.attempt, why, DropReason.ROLLOUT_FAILED)
        self._forget_records(group)
        self._on_ended(ended)
        self._state.changed()

    def _settle(self, group_id: str, attempt: int) -> None:
        """An attempt is in flight no more: no deadline, and its span is over."""
        self._due_s.pop((group_id, attempt), None)
        span = self._spans.pop((group_id, attempt), None)
        if span is not None:
            self._state.reporting.timeline.end(span, self._state.clock.wall())

    def _forget_records(self, group: PromptGroup) -> None:
        current = self._state.flow.group(group.group_id)
        if current is not None:
            self._state.train.requeue(group.group_id, current.attempt)

    # Trouble

    def overdue(self, now_s: float) -> None:
        """Begin anew what a worker has held for longer than `rollout.request_timeout_s`."""
        for (group_id, attempt), due_s in list(self._due_s.items()):
            if due_s > now_s:
                continue
            self._settle(group_id, attempt)
            if self._evals.owns(group_id):
                self._evals.ended(group_id, attempt, is_generated=False)
                self._state.changed()
                self.pump()
                continue
            group = self._state.flow.group(group_id)
            if group is not None and group.attempt == attempt:
                self._again(group, "the worker held it for too long")

    def lost(self, worker: str) -> None:
        """A worker counts as lost: its stream ends, and its groups begin anew elsewhere."""
        outbox = self._outboxes.pop(worker, None)
        if outbox is not None:
            outbox.put_nowait(None)
            self._lose(worker)

    def _lose(self, worker: str) -> None:
        self._serving.pop(worker, None)
        self._capacities.pop(worker, None)
        flow = self._state.flow
        groups = flow.in_flight(worker)
        ended = flow.worker_lost(worker)
        for group in groups:
            self._settle(group.group_id, group.attempt)
            self._forget_records(group)
        for group in self._evals.worker_lost(worker):  # before anything is sent: it has no outbox any more
            self._settle(group.group_id, group.attempt)
        self._on_ended(ended)
        self._state.changed()
        self.pump()
