"""Timed stand-ins for the overlap benchmark: an inference engine and a learner that keep time and compute nothing.

They talk to the engine as real ones do: the rollout worker's and the learner's own loops run around them.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Protocol, cast
from weakref import WeakKeyDictionary

from headrace.clients.cli.benchmarks.overlap_load import Lengths, Load, NumberRenderer
from headrace.engine.clock import SystemClock
from headrace.engine.errors import StoppedError
from headrace.engine.interfaces import TrainerBackend
from headrace.engine.plugins import load_object
from headrace.engine.testing import ScriptedInferenceBackend, ScriptedTrainer
from headrace.engine.transport.buffer_take import TakenBatch
from headrace.engine.transport.control import BlockingControlClient, ControlClient, Joined, Span
from headrace.engine.types import GenerateRequest, PolicyVersion, TokenChunk, WeightUpdate
from headrace.v1 import control_pb2 as pb


class Line(Protocol):
    """A learner rank's line to the hub."""

    def take(self, step: int, deadline_s: float) -> TakenBatch: ...

    def commit(self, step: int, lease_token: int, skipped: bool) -> PolicyVersion: ...

    def publish(self, part: WeightUpdate) -> bool: ...

    def report(self, step: int, spans: Sequence[Span], metrics: dict[str, float]) -> None: ...

    def doing(self, what: str) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class _Loop(Protocol):
    def run(self, first_step: int, *, publish_first: bool) -> None: ...


class Pace:
    """Sleeps that do not add up their lateness: a timer that fires late makes the next of the same task come sooner."""

    def __init__(self) -> None:
        self._due_s: WeakKeyDictionary[asyncio.Task[object], float] = WeakKeyDictionary()

    def __call__(self, seconds: float) -> Coroutine[object, object, None]:
        """Wait until `seconds` after the moment that the calling task's last wait was meant to end."""
        task = asyncio.current_task()
        assert task is not None
        now_s = time.monotonic()
        due_s = self._due_s.get(task, now_s)
        if due_s < now_s - seconds:  # it stood still in between
            due_s = now_s
        self._due_s[task] = due_s + seconds
        return asyncio.sleep(max(0.0, due_s + seconds - now_s))


class TimedBackend(ScriptedInferenceBackend):
    """Samples at a constant speed and keeps a record of how many groups were running when.

    Attributes:
        changes: (monotonic seconds, groups running from then on).
        generated_tokens: Also those of samples that were aborted.
    """

    def __init__(self, load: Load, lengths: Lengths, version: PolicyVersion) -> None:
        super().__init__(
            lengths.script,
            tokens_per_s=load.tokens_per_s,
            tokens_per_chunk=load.tokens_per_chunk,
            max_running=load.slots * load.group_size,
            version=version,
            sleep=Pace(),
        )
        self.changes: list[tuple[float, int]] = []
        self.generated_tokens = 0
        self._running: dict[str, int] = {}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See the base class."""
        group = request.request_id.partition("/")[0]
        self._count(group, 1)
        try:
            async with contextlib.aclosing(super().generate(request)) as chunks:
                async for chunk in chunks:
                    self.generated_tokens += len(chunk.token_ids)
                    yield chunk
        finally:
            self._count(group, -1)

    def _count(self, group: str, by: int) -> None:
        before = len(self._running)
        count = self._running.get(group, 0) + by
        if count:
            self._running[group] = count
        else:
            del self._running[group]
        if len(self._running) != before:
            self.changes.append((time.monotonic(), len(self._running)))


class Rollout:
    """The rollout side: a real worker around a `TimedBackend`."""

    def __init__(self, load: Load, lengths: Lengths) -> None:
        self._load = load
        self._lengths = lengths
        self.backend: TimedBackend | None = None

    async def run(self, hub: str) -> None:
        """Work until the hub drains the worker. Cancelling ends it.

        Raises:
            ActorLostError: The hub is gone.
        """
        run_worker = cast(
            "Callable[..., Coroutine[object, object, None]]", load_object("headrace.actors.rollout.main:run_worker")
        )
        try:
            await run_worker(hub, "rollout-0", start_engine=self._start)
        except* StoppedError:
            pass  # the hub is ending the run, which its weight subscription may hear first

    async def _start(self, control: ControlClient, run: Joined) -> tuple[TimedBackend, NumberRenderer, PolicyVersion]:
        self.backend = TimedBackend(self._load, self._lengths, run.version)
        await self.backend.start()
        control.progress.moved("waiting for groups", pb.PHASE_READY)
        return self.backend, NumberRenderer(), run.version


class Learner:
    """The learner side: the real loop around a trainer that sleeps.

    Attributes:
        committed_s: Monotonic seconds at which each step was committed.
        busy_s: Begin and end of each step's training, monotonic seconds.
        batches: What was trained on, without the records: tokens, mean and largest lag of each step.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.committed_s: list[float] = []
        self.busy_s: list[tuple[float, float]] = []
        self.batches: list[tuple[int, float, int]] = []

    def run(self, hub: str, folder: Path) -> None:
        """Train to the end of the run; blocks.

        Raises:
            ActorLostError: The hub is gone.
        """
        make_line = cast("Callable[..., Line]", load_object("headrace.engine.transport.learner:LearnerClient"))
        make_loop = cast("Callable[..., _Loop]", load_object("headrace.actors.learner.loop:LearnerLoop"))
        with BlockingControlClient(hub, pb.ROLE_LEARNER, "learner-0") as control:
            run = control.join(0)
            line = make_line(hub, control, run, 0, 1)
            loop = make_loop(
                config=run.config,
                trainer=ScriptedTrainer(run_id=run.run_id, step_s=self._step_s, sleep=self._sleep),
                hub=_TimedLine(line, self),
                checkpoints=_NoCheckpoints(),
                payload_dirs=(Path(run.payload_dir), folder),
                rank=0,
                clock=SystemClock(),
            )
            try:
                loop.run(run.version.version, publish_first=False)
            finally:
                line.close()

    def _sleep(self, seconds: float) -> None:
        begin_s = time.monotonic()
        time.sleep(seconds)
        self.busy_s.append((begin_s, time.monotonic()))


class _NoCheckpoints:
    def save(self, trainer: TrainerBackend, step: int) -> None:
        return


class _TimedLine:
    """A line that notes down what was taken and when it was committed."""

    def __init__(self, line: Line, learner: Learner) -> None:
        self._line = line
        self._learner = learner
        self.publish, self.report, self.doing, self.say = line.publish, line.report, line.doing, line.say

    def take(self, step: int, deadline_s: float) -> TakenBatch:
        taken = self._line.take(step, deadline_s)
        self._learner.batches.append((taken.num_loss_tokens, taken.mean_lag, taken.max_lag))
        return taken

    def commit(self, step: int, lease_token: int, skipped: bool) -> PolicyVersion:
        version = self._line.commit(step, lease_token, skipped)
        self._learner.committed_s.append(time.monotonic())
        return version
