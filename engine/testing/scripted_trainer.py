"""A trainer backend without a model: numpy weights that move by a known rule, for tests and the simulator.

Invariants:

- Each step counts, skipped or not; the weights change only in a step that is not skipped.
- Equal sequences of batches give bit-equal weights.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engine.errors import FormatError, NonFiniteStreakError
from headrace.engine.types import (
    MicroBatch,
    PolicyVersion,
    StepBatch,
    StepResult,
    TensorSpec,
    WeightUpdate,
)
from headrace.engine.weights.payload import KeyframeWriter

_FILE_NAME = "scripted-trainer.json"
_FIRST_VERSION = PolicyVersion(0, 0)


class _State(msgspec.Struct, frozen=True, kw_only=True):
    """What `save` writes."""

    incarnation: int
    version: int
    num_skipped: int
    weights: list[float]


class ScriptedTrainer:
    """Adds `learning_rate` times the mean advantage of the loss tokens to each of its weights."""

    def __init__(
        self,
        *,
        num_weights: int = 8,
        learning_rate: float = 0.125,
        run_id: str = "run",
        version: PolicyVersion = _FIRST_VERSION,
        step_s: float = 0.0,
        max_nonfinite_steps: int = 10,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Prepare a trainer of one rank.

        Args:
            num_weights: Length of its one tensor "weights", float32.
            learning_rate: See the class.
            run_id: Goes into the updates.
            version: Before the first step.
            step_s: How long a step takes.
            max_nonfinite_steps: Skipped steps in a row that are one too many.
            sleep: Waits for `step_s`; a fake makes tests instant.
        """
        self._weights = np.linspace(-1, 1, num_weights, dtype=np.float32)
        self._learning_rate = np.float32(learning_rate)
        self._run_id = run_id
        self.version = version
        self._step_s = step_s
        self._max_nonfinite_steps = max_nonfinite_steps
        self._num_skipped = 0
        self._sleep = sleep

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        """float32 [num_weights], a copy."""
        return self._weights.copy()

    def logprobs(self, micro_batch: MicroBatch) -> npt.NDArray[np.float32]:
        """Something that depends on token, temperature and weights alone: float32 [N], 0 at each first token."""
        if micro_batch.token_ids.size == 0:
            return np.zeros(0, np.float32)
        level = np.float32(1) + np.float32(np.tanh(self._weights.mean()) / 2)
        scores = -(level + (micro_batch.token_ids % 7).astype(np.float32) / 7)
        scores /= np.maximum(micro_batch.temperature[micro_batch.sequence_ids], np.float32(1e-3))
        scores[micro_batch.position_ids == 0] = 0
        return scores.astype(np.float32)

    def step(self, batch: StepBatch) -> StepResult:
        """Sleep `step_s`, move the weights, count the version.

        Raises:
            NonFiniteStreakError: `max_nonfinite_steps` steps in a row were skipped for an advantage that is not finite.
        """
        self._sleep(self._step_s)
        total = np.float64(0)
        for micro_batch in batch.micro_batches:
            total += micro_batch.advantages[micro_batch.loss_mask == 1].sum(dtype=np.float64)
        finite = bool(np.isfinite(total))
        skipped = batch.num_loss_tokens == 0 or not finite
        mean = 0.0 if skipped else float(total / batch.num_loss_tokens)
        if not skipped:
            self._weights += self._learning_rate * np.float32(mean)
        self._num_skipped = 0 if finite else self._num_skipped + 1
        if self._num_skipped >= self._max_nonfinite_steps:
            raise NonFiniteStreakError(f"{self._num_skipped} steps in a row had an advantage that is not finite")
        self.version = PolicyVersion(self.version.incarnation, self.version.version + 1)
        metrics = {"actor/pg_loss": -mean, "actor/grad_norm": abs(mean)}
        return StepResult(version=self.version, skipped=skipped, metrics=metrics)

    def export_update(self, since: PolicyVersion | None, payload_dir: Path) -> WeightUpdate:
        """Write a keyframe, whatever `since` is; the same version has the same bytes."""
        tensors = (TensorSpec(name="weights", dtype="float32", shape=self._weights.shape),)
        path = payload_dir / f"scripted-{self.version.incarnation}-{self.version.version}.bin"
        with KeyframeWriter(path, tensors, run_id=self._run_id, version=self.version) as writer:
            writer.write(0, 0, self._weights)
            manifest = writer.manifest()
        return WeightUpdate(manifest=manifest, local_path=str(path))

    def save(self, folder: Path) -> None:
        """Write one JSON file; it is there wholly or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {
            "incarnation": self.version.incarnation,
            "version": self.version.version,
            "num_skipped": self._num_skipped,
            "weights": [float(value) for value in self._weights],
        }
        partial = folder / (_FILE_NAME + ".partial")
        with partial.open("w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / _FILE_NAME)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote.

        Raises:
            FormatError: There is no such file, or it holds something else.
        """
        path = folder / _FILE_NAME
        try:
            state = msgspec.json.decode(path.read_bytes(), type=_State)
        except (OSError, msgspec.DecodeError) as error:
            raise FormatError(f"{path} is not a checkpoint of a scripted trainer: {error}") from error
        self.version = PolicyVersion(state.incarnation, state.version)
        self._num_skipped = state.num_skipped
        self._weights = np.array(state.weights, np.float32)

    def close(self) -> None:
        """Nothing to leave."""
