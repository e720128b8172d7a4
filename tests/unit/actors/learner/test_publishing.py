"""Publishing beside training: order, bases, refusals, errors. Events stand for durations."""

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.learner.ahead import BatchesAhead
from headrace.actors.learner.publishing import Publishing
from headrace.engine.clock import SystemClock
from headrace.engine.errors import FencedError, StorageError, WrongBaseError
from headrace.engine.testing.scripted_trainer import ScriptedTrainer
from headrace.engine.transport.control import Span
from headrace.engine.types import PolicyVersion, StepBatch, UpdateKind, WeightUpdate
from headrace.engine.weights.buckets import DeltaPart
from headrace.engine.weights.keyframe import KeyframeWriter

LIMIT_S = 10.0


def at(version: int) -> PolicyVersion:
    return PolicyVersion(0, version)


class Hub:
    """Takes parts once it is let; raises what it is told to."""

    def __init__(self) -> None:
        self.takes_deltas = True
        self.let = threading.Event()
        self.let.set()
        self.published: list[WeightUpdate] = []
        self.errors: list[Exception] = []
        self.said: list[str] = []

    def publish(self, part: WeightUpdate) -> bool:
        assert self.let.wait(LIMIT_S)
        if self.errors:
            raise self.errors.pop(0)
        self.published.append(part)
        return True

    def say(self, text: str) -> None:
        self.said.append(text)


class Staged:
    """A version of `Trainer`; a delta is one without content."""

    def __init__(self, trainer: "Trainer", since: PolicyVersion | None) -> None:
        self.version = trainer.version
        self._trainer, self._since = trainer, since
        self.settled: bool | None = None

    def write(self, payload_dir: Path, *, full: bool = False) -> WeightUpdate:
        if not payload_dir.exists():
            raise StorageError("no room")
        tensors = self._trainer.tensors
        if full or self._since is None:
            with KeyframeWriter(payload_dir / "k", tensors, run_id="run", version=self.version) as writer:
                return WeightUpdate(manifest=writer.manifest(), local_path=str(payload_dir / "k"))
        part = DeltaPart(tensors, run_id="run", version=self.version, base=self._since)
        return WeightUpdate(manifest=part.manifest(), local_path="")

    def settle(self, *, accepted: bool) -> None:
        self.settled = accepted


class Trainer(ScriptedTrainer):
    """A scripted trainer that copies its weights for publishing."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = ()
        self.staged: list[Staged] = []

    def stage_update(self, since: PolicyVersion | None) -> Staged:
        self.staged.append(Staged(self, since))
        return self.staged[-1]

    def advance(self) -> None:
        self.version = at(self.version.version + 1)


def make(trainer: ScriptedTrainer, hub: Hub, *folders: Path) -> Publishing:
    return Publishing(trainer, hub, folders, SystemClock())


def test_the_next_step_begins_while_a_version_is_being_published(tmp_path: Path) -> None:
    trainer, hub = Trainer(), Hub()
    publishing = make(trainer, hub, tmp_path)
    hub.let.clear()
    trainer.advance()
    assert publishing.begin() == []
    began_s = SystemClock().wall()  # of the next step, which runs here
    assert publishing.running is not None and not publishing.running.done()
    hub.let.set()
    (span,) = publishing.join()
    assert (span.track, span.name) == ("weights", "publish v1")
    assert span.start_s <= began_s <= span.end_s
    assert trainer.staged[0].settled is True and publishing.join() == []


def test_at_most_one_is_under_way_and_the_next_starts_from_what_was_taken(tmp_path: Path) -> None:
    trainer, hub = Trainer(), Hub()
    publishing = make(trainer, hub, tmp_path)
    spans: list[Span] = []
    for _ in range(3):
        trainer.advance()
        spans += publishing.begin()
        assert len(hub.published) >= len(trainer.staged) - 1
    spans += publishing.join()
    assert [span.name for span in spans] == ["publish v1", "publish v2", "publish v3"]
    assert [update.manifest.base for update in hub.published] == [None, at(1), at(2)]


def test_without_receivers_that_take_deltas_every_version_is_full(tmp_path: Path) -> None:
    trainer, hub = Trainer(), Hub()
    hub.takes_deltas = False
    publishing = make(trainer, hub, tmp_path)
    for _ in range(2):
        trainer.advance()
        publishing.begin()
    publishing.join()
    assert {update.manifest.kind for update in hub.published} == {UpdateKind.KEYFRAME}


def test_a_delta_refused_for_its_base_is_published_in_full_under_the_same_version(tmp_path: Path) -> None:
    trainer, hub = Trainer(), Hub()
    publishing = make(trainer, hub, tmp_path)
    trainer.advance()
    publishing.begin()
    publishing.join()
    hub.errors = [WrongBaseError("from 1, which is not held")]
    trainer.advance()
    publishing.begin()
    publishing.join()
    kinds = [(update.manifest.version, update.manifest.kind) for update in hub.published]
    assert kinds == [(at(1), UpdateKind.KEYFRAME), (at(2), UpdateKind.KEYFRAME)]
    assert hub.said == ["version 2 is published in full: from 1, which is not held"]
    trainer.advance()
    publishing.begin()
    publishing.join()
    assert hub.published[-1].manifest.base == at(2)


def test_an_error_is_raised_at_the_next_call_and_the_update_after_it_is_full(tmp_path: Path) -> None:
    trainer, hub = Trainer(), Hub()
    publishing = make(trainer, hub, tmp_path)
    hub.errors = [FencedError("a successor is at work")]
    trainer.advance()
    publishing.begin()
    with pytest.raises(FencedError, match="successor"):
        publishing.begin()
    assert trainer.staged[0].settled is False
    publishing.begin()
    publishing.join()
    assert hub.published[-1].manifest.base is None


def test_an_error_ends_the_wait_for_a_batch_that_may_never_come() -> None:
    never, publishing = threading.Event(), Future[Any]()

    def take(step: int, _: float) -> str:
        if step > 0:
            never.wait(LIMIT_S)
        return "batch"

    batches = BatchesAhead(take, num_steps=2, ahead=True, wait_s=LIMIT_S, train_s=LIMIT_S)
    batches.get(0)
    publishing.set_exception(StorageError("no room"))
    with pytest.raises(StorageError):
        batches.get(1, publishing)
    never.set()


def test_a_batch_is_handed_out_whether_publishing_is_done_or_not() -> None:
    done, open_ended = Future[Any](), Future[Any]()
    done.set_result(None)
    batches = BatchesAhead(lambda step, _: step, num_steps=3, ahead=True, wait_s=LIMIT_S, train_s=LIMIT_S)
    assert [batches.get(0), batches.get(1, done), batches.get(2, open_ended)] == [0, 1, 2]


def test_a_folder_without_room_is_left_for_the_next_one(tmp_path: Path) -> None:
    trainer, hub = Trainer(), Hub()
    publishing = make(trainer, hub, tmp_path / "absent", tmp_path / "disk")
    trainer.advance()
    publishing.begin()
    publishing.join()
    assert hub.published[0].local_path.startswith(str(tmp_path / "disk"))
    assert len(hub.said) == 1 and "slower: no room" in hub.said[0]


def test_a_trainer_that_cannot_copy_publishes_before_the_next_step(tmp_path: Path) -> None:
    trainer, hub = ScriptedTrainer(), Hub()
    publishing = make(trainer, hub, tmp_path)
    publishing.begin()
    assert publishing.running is not None and publishing.running.done()
    assert hub.published[0].manifest.version == at(0)
    trainer.step(StepBatch(step=0, micro_batches=(), num_loss_tokens=0, num_sequences=0, num_groups=0))
    assert [span.name for span in publishing.begin() + publishing.join()] == ["publish v0", "publish v1"]
