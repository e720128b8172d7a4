"""The scripted trainer keeps every rule of a trainer, and the check finds those that do not."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.engine.errors import FormatError, NonFiniteStreakError
from headrace.engine.testing import ScriptedTrainer, check_trainer_backend, make_micro_batch, make_step_batch
from headrace.engine.types import MicroBatch, PolicyVersion, StepBatch, StepResult


def test_the_scripted_trainer_conforms(tmp_path: Path) -> None:
    check_trainer_backend(ScriptedTrainer, tmp_path)


class _ScoresFirstTokens(ScriptedTrainer):
    def logprobs(self, micro_batch: MicroBatch) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return np.full(micro_batch.token_ids.shape, -1, np.float32)


class _DoesNotCountSkipped(ScriptedTrainer):
    def step(self, batch: StepBatch) -> StepResult:
        result = super().step(batch)
        if result.skipped:
            self.version = PolicyVersion(0, result.version.version - 1)
        return msgspec.structs.replace(result, version=self.version)


class _MovesWhenSkipped(ScriptedTrainer):
    def step(self, batch: StepBatch) -> StepResult:
        self._weights += np.float32(0.5)
        return super().step(batch)


class _StandsStill(ScriptedTrainer):
    def __init__(self) -> None:
        super().__init__(learning_rate=0)


class _ForgetsTheVersion(ScriptedTrainer):
    def load(self, folder: Path) -> None:
        super().load(folder)
        self.version = PolicyVersion(0, 0)


class _LoadsAnything(ScriptedTrainer):
    def load(self, folder: Path) -> None:
        if folder.name == "checkpoint":
            super().load(folder)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (_ScoresFirstTokens, "first token of a sequence"),
        (_DoesNotCountSkipped, "count the version up all the same"),
        (_MovesWhenSkipped, "skipped step must not change"),
        (_StandsStill, "must change the weights"),
        (_ForgetsTheVersion, "restore the version"),
        (_LoadsAnything, "absent folder must fail; nothing was raised"),
    ],
)
def test_the_check_finds_a_broken_trainer(broken: type[ScriptedTrainer], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_trainer_backend(broken, tmp_path)


def test_steps_sleep_as_long_as_they_are_told() -> None:
    slept: list[float] = []
    trainer = ScriptedTrainer(step_s=2.5, sleep=slept.append)
    trainer.step(make_step_batch(make_micro_batch()))
    assert slept == [2.5]


def test_a_streak_of_nonfinite_steps_ends_the_run() -> None:
    trainer = ScriptedTrainer(max_nonfinite_steps=2)
    good = make_micro_batch()
    bad = msgspec.structs.replace(good, advantages=np.where(good.loss_mask == 1, np.float32(np.nan), np.float32(0)))
    before = trainer.weights
    assert trainer.step(make_step_batch(bad)).skipped
    np.testing.assert_array_equal(trainer.weights, before)
    assert not trainer.step(make_step_batch(good)).skipped
    assert trainer.step(make_step_batch(bad)).skipped
    with pytest.raises(NonFiniteStreakError, match="2 steps in a row"):
        trainer.step(make_step_batch(bad))


def test_a_damaged_checkpoint_is_a_format_error(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    trainer.save(tmp_path)
    file = next(tmp_path.glob("*.json"))
    for text in ("", "{}", "[1]", file.read_text()[:-5]):
        file.write_text(text)
        with pytest.raises(FormatError, match="not a checkpoint"):
            trainer.load(tmp_path)
