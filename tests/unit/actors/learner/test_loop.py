"""The order of training, committing, publishing and saving. Events stand for durations."""

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.actors.learner.loop import LearnerLoop
from headrace.engine.clock import SystemClock
from headrace.engine.config import Config
from headrace.engine.errors import StorageError
from headrace.engine.interfaces import TrainerBackend
from headrace.engine.testing.scripted_trainer import ScriptedTrainer
from headrace.engine.transport.buffer_take import TakenBatch
from headrace.engine.transport.control import Span
from headrace.engine.types import PolicyVersion, StepBatch, StepResult, TensorSpec, UpdateKind, WeightUpdate
from headrace.engine.weights.sender import HostBits, Shard, StagedPart, WeightSender
from headrace.engine.weights.ulp import RawArray

LIMIT_S = 10.0


class Hub:
    """Hands out empty batches; publishing waits until it is let."""

    takes_deltas = True

    def __init__(self) -> None:
        self.events: list[str] = []
        self.spans: list[Span] = []
        self.published: list[WeightUpdate] = []
        self.let = threading.Event()
        self.let.set()
        self.error: StorageError | None = None
        self.version = 0

    def take(self, step: int, deadline_s: float) -> TakenBatch:
        self.events.append(f"take {step}")
        return TakenBatch(
            step=step,
            lease_token=1,
            micro_batches=(),
            records={},
            columns={},
            num_loss_tokens=0,
            num_sequences=0,
            num_groups=0,
            mean_lag=0.0,
            max_lag=0,
        )

    def commit(self, step: int, lease_token: int, skipped: bool) -> PolicyVersion:
        self.events.append(f"commit {step}")
        return PolicyVersion(0, step + 1)

    def publish(self, part: WeightUpdate) -> bool:
        assert self.let.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        self.events.append(f"publish {part.manifest.version}")
        self.published.append(part)
        return True

    def report(self, step: int, spans: Sequence[Span], metrics: dict[str, float]) -> None:
        self.spans += spans

    def doing(self, what: str) -> None: ...

    def say(self, text: str) -> None: ...


class Trainer(ScriptedTrainer):
    """Its weights move by a rule, and are published by a real sender. A step lets the publishing before it go on."""

    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self._hub = hub
        self._state: RawArray = np.arange(1000, dtype=np.uint32)
        self._sender: WeightSender[RawArray] = WeightSender(
            [TensorSpec(name="w", dtype="float32", shape=(1000,))],
            run_id="run",
            rank=0,
            keyframe_steps=25,
            bits=HostBits(),
        )

    def step(self, batch: StepBatch) -> StepResult:
        self._hub.events.append(f"step {batch.step}")
        self._state = self._state + (np.arange(1000) % 97 == batch.step).astype(np.uint32)
        if batch.step > 0:
            self._hub.let.set()
        return super().step(batch)

    def stage_update(self, since: PolicyVersion | None) -> StagedPart[RawArray]:
        full = self._sender.needs_keyframe(self.version, since)
        state: RawArray = self._state.copy()
        shard = Shard(tensor_index=0, runs=((0, 1000),), elements=state)
        return self._sender.stage(self.version, [shard], full=full)


class Checkpoints:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def save(self, trainer: TrainerBackend, step: int) -> None:
        self._hub.events.append(f"save {step}")


def loop(hub: Hub, trainer: ScriptedTrainer, folder: Path, *, steps: int = 3, max_staleness: int = 1) -> LearnerLoop:
    config = Config()
    config = msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, steps=steps),
        schedule=msgspec.structs.replace(config.schedule, max_staleness=max_staleness),
    )
    return LearnerLoop(
        config=config,
        trainer=trainer,
        hub=hub,
        checkpoints=Checkpoints(hub),
        payload_dirs=[folder],
        rank=0,
        clock=SystemClock(),
    )


def test_a_version_is_published_while_the_next_step_trains_as_the_spans_show(tmp_path: Path) -> None:
    hub = Hub()
    hub.let.clear()  # until step 1 is under way
    loop(hub, Trainer(hub), tmp_path).run(0, publish_first=False)
    spans = {span.name: span for span in hub.spans}
    assert {"publish v1", "publish v2", "publish v3", "step 1", "step 2", "step 3"} <= spans.keys()
    assert spans["publish v1"].start_s <= spans["step 2"].start_s <= spans["publish v1"].end_s
    kinds = [update.manifest.kind for update in hub.published]
    assert kinds == [UpdateKind.KEYFRAME, UpdateKind.DELTA, UpdateKind.DELTA]


def test_a_step_is_committed_before_its_version_is_published_and_that_before_a_checkpoint(tmp_path: Path) -> None:
    hub = Hub()
    loop(hub, Trainer(hub), tmp_path, steps=2).run(0, publish_first=False)
    order = [hub.events.index(event) for event in ("commit 1", "publish 2", "save 2")]
    assert order == sorted(order)
    assert hub.events.index("commit 0") < hub.events.index("publish 1")


def test_on_policy_the_next_batch_is_asked_for_once_its_version_is_published(tmp_path: Path) -> None:
    hub = Hub()
    loop(hub, Trainer(hub), tmp_path, steps=2, max_staleness=0).run(0, publish_first=False)
    assert hub.events.index("publish 1") < hub.events.index("take 1")


def test_a_resumed_run_publishes_in_full_before_its_first_step(tmp_path: Path) -> None:
    hub = Hub()
    loop(hub, Trainer(hub), tmp_path, steps=1).run(0, publish_first=True)
    assert hub.events[0] == "publish 0" and hub.published[0].manifest.kind is UpdateKind.KEYFRAME


def test_an_error_of_publishing_ends_the_loop(tmp_path: Path) -> None:
    hub = Hub()
    hub.error = StorageError("no room")
    with pytest.raises(StorageError):
        loop(hub, Trainer(hub), tmp_path, steps=50).run(0, publish_first=False)
    assert "commit 2" not in hub.events
