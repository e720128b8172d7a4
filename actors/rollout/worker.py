"""A rollout worker: takes groups from the hub, samples them, puts whole groups into the buffer.

    consumes    prompt groups, as many at a time as its capacity says
    produces    encoded trajectories, one put a group
    waits for   a group; the engine's tokens; room in the buffer; a new policy version
    unblocked by the hub's Work stream; the engine; the buffer's credits; the weight subscription

Invariants:
- A group is said to be generated only after the buffer has accepted all its records.
- The version that the hub is told is one that the engine has acknowledged.
- A failure of one group ends that group, not the worker; a failure of the engine ends the worker.
- An update that waits for what is sampled does not wait for groups that came after it: they wait for the update.
- After an update that has failed in the engine no group is begun until one is served: it would only fail, and lose an
  attempt. Updates that were refused before they touched the engine, or were taken back (the ack then has the digest of
  what is served), hold nothing back.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Generator

import grpc.aio

from headrace.actors.rollout.rendering import Renderer
from headrace.actors.rollout.sampling import sample_once
from headrace.engine.clock import Clock
from headrace.engine.config import Config
from headrace.engine.errors import ActorLostError, HeadraceError, PromptTooLongError, RunError
from headrace.engine.interfaces import InferenceBackend
from headrace.engine.records import encode_trajectory, header_of
from headrace.engine.transport.buffer import BufferClient
from headrace.engine.transport.control import Progress, Span
from headrace.engine.transport.convert import group_from_proto, version_to_proto
from headrace.engine.transport.status import error_from_rpc
from headrace.engine.types import AckStatus, PolicyVersion, PromptGroup, WeightAck, WeightUpdate
from headrace.v1 import rollout_pb2 as pb
from headrace.v1 import rollout_pb2_grpc

log = logging.getLogger(__name__)


class RolloutWorker:
    """The worker's loop around an inference backend that has been started."""

    def __init__(
        self,
        *,
        worker_id: str,
        config: Config,
        backend: InferenceBackend,
        renderer: Renderer,
        channel: grpc.aio.Channel,
        buffer: BufferClient,
        serving: PolicyVersion,
        progress: Progress,
        clock: Clock,
        on_span: Callable[[Span], None],
    ) -> None:
        self._id = worker_id
        self._config = config
        self._backend = backend
        self._renderer = renderer
        self._stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        self._buffer = buffer
        self._serving = serving
        self._progress = progress
        self._clock = clock
        self._on_span = on_span
        self._outbox: asyncio.Queue[pb.WorkRequest | None] = asyncio.Queue()
        self._groups: dict[tuple[str, int], asyncio.Task[None]] = {}  # by id and attempt
        self._num_sampling = 0
        self._at_rest = asyncio.Event()
        self._at_rest.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._is_broken = False  # the last update that reached the engine has left it without a whole state
        self._fatal: BaseException | None = None
        self._end_stream: Callable[[], object] = lambda: None

    async def run(self) -> None:
        """Work until the hub drains this worker. Cancelling aborts what is running.

        Raises:
            ActorLostError: The hub is gone.
        """
        self._say(pb.WorkRequest(serving=version_to_proto(self._serving)))
        # One group more than the engine runs at a time, so that it never waits for the hub.
        capacity = self._config.rollout.max_num_seqs + self._config.schedule.group_size
        self._say(pb.WorkRequest(capacity=capacity))
        call = self._stub.Work(self._requests())
        self._end_stream = call.cancel
        try:
            async for command in call:
                match command.WhichOneof("command"):
                    case "group":
                        self._begin(group_from_proto(command.group))
                    case "cancel_group_id":
                        self._cancel(command.cancel_group_id)
                    case "drain":
                        break
                    case None:
                        log.warning("the hub sent an empty command")
            await self._idle.wait()
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, "taking groups from the hub") from error
        except asyncio.CancelledError:
            if self._fatal is not None:
                raise engine_failed(self._fatal) from self._fatal
            raise
        finally:
            tasks = list(self._groups.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._outbox.put_nowait(None)
            call.cancel()

    async def apply(self, update: WeightUpdate) -> WeightAck:
        """Bring the engine to a new version and tell the hub.

        With `rollout.partial_rollout = false` what runs is finished first, under the old version. After an update that
        failed groups wait for the next one; the hub sends it at once.
        """
        try:
            if not self._config.rollout.partial_rollout:
                self._admitting.clear()
                await self._at_rest.wait()
            started_s = self._clock.wall()
            ack = await self._backend.apply(update)
            if ack.status in (AckStatus.SERVING, AckStatus.FAILED):
                self._is_broken = ack.status is AckStatus.FAILED and not ack.digest
            self._on_span(
                Span(track="weights", name=f"v{update.manifest.version}", start_s=started_s, end_s=self._clock.wall())
            )
        finally:
            if self._is_broken:
                self._admitting.clear()
            else:
                self._admitting.set()
        if ack.version != self._serving:
            self._serving = ack.version
            self._say(pb.WorkRequest(serving=version_to_proto(ack.version)))
        return ack

    def _begin(self, group: PromptGroup) -> None:
        attempts = [attempt for group_id, attempt in self._groups if group_id == group.group_id]
        if attempts and max(attempts) >= group.attempt:
            log.warning("group %s is running already; the second copy is ignored", group.group_id)
            return
        self._cancel(group.group_id)  # an earlier attempt: the hub has given it up
        self._idle.clear()
        task = asyncio.create_task(self._run_group(group), name=f"group {group.group_id}")
        self._groups[group.group_id, group.attempt] = task
        task.add_done_callback(lambda _: self._forget(group))
        self._progress.moved(f"sampling {len(self._groups)} groups")

    def _cancel(self, group_id: str) -> None:
        for (running, _), task in self._groups.items():
            if running == group_id:
                task.cancel()

    def _forget(self, group: PromptGroup) -> None:
        self._groups.pop((group.group_id, group.attempt), None)
        if not self._groups:
            self._idle.set()

    async def _run_group(self, group: PromptGroup) -> None:
        """Sample one group to its end and say how it ended."""
        status: pb.GroupEnded.Status.ValueType = pb.GroupEnded.STATUS_GENERATED
        message = ""
        try:
            # The wait for an update counts too: the hub gives a group up by the time at which it was sent.
            async with asyncio.timeout(self._config.rollout.request_timeout_s):
                await self._admitted()
                with self._sampling():
                    await self._sample_and_put(group)
        except asyncio.CancelledError:
            status = pb.GroupEnded.STATUS_ABORTED
        except TimeoutError:
            status = pb.GroupEnded.STATUS_FAILED
            message = f"not finished within rollout.request_timeout_s = {self._config.rollout.request_timeout_s:g}"
        except PromptTooLongError as error:
            status = pb.GroupEnded.STATUS_PROMPT_TOO_LONG
            message = str(error)
        except Exception as error:
            log.warning("group %s failed", group.group_id, exc_info=error)
            status = pb.GroupEnded.STATUS_FAILED
            message = f"{type(error).__name__}: {error}"
            if isinstance(error, ActorLostError) or not isinstance(error, HeadraceError):
                self._fatal = error
                self._end_stream()
        self._progress.moved(f"sampling {len(self._groups) - 1} groups")
        ended = pb.GroupEnded(group_id=group.group_id, attempt=group.attempt, status=status, message=message)
        self._say(pb.WorkRequest(group_ended=ended))

    async def _admitted(self) -> None:
        """Wait until no update holds new groups back."""
        while not self._admitting.is_set():  # the next update may close it again before this task goes on
            await self._admitting.wait()

    @contextlib.contextmanager
    def _sampling(self) -> Generator[None]:
        """What an update has to wait for, with `rollout.partial_rollout = false`."""
        self._num_sampling += 1
        self._at_rest.clear()
        try:
            yield
        finally:
            self._num_sampling -= 1
            if self._num_sampling == 0:
                self._at_rest.set()

    async def _sample_and_put(self, group: PromptGroup) -> None:
        prompt_ids = self._renderer.render(group.prompt)
        limit = self._config.model.max_context_tokens
        if len(prompt_ids) + group.sampling.max_tokens > limit:
            raise PromptTooLongError(
                f"prompt {group.prompt.prompt_id!r} has {len(prompt_ids)} tokens, which with rollout.max_tokens = "
                f"{group.sampling.max_tokens} exceed model.max_context_tokens = {limit}; raise the limit, shorten the "
                'prompt, or set rollout.overlong_prompt = "drop"'
            )
        samples = [
            sample_once(self._backend, self._renderer, group, index, prompt_ids, self._clock)
            for index in range(group.group_size)
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(sample) for sample in samples]
        except* HeadraceError as several:
            raise several.exceptions[0] from several
        trajectories = [task.result() for task in running]
        rejected = await self._buffer.put(group.table, [(header_of(t), encode_trajectory(t)) for t in trajectories])
        if rejected:
            raise RunError(f"the buffer refused {len(rejected)} of {len(trajectories)} records: {rejected[0].reason}")

    def _say(self, request: pb.WorkRequest) -> None:
        request.worker_id = self._id
        self._outbox.put_nowait(request)

    async def _requests(self) -> AsyncIterator[pb.WorkRequest]:
        while (request := await self._outbox.get()) is not None:
            yield request


def engine_failed(error: BaseException) -> ActorLostError:
    """The error of a worker whose inference engine has died."""
    return ActorLostError(f"the inference engine ended: {type(error).__name__}: {error}")
