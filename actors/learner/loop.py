"""The learner's loop on one rank: take, train, commit, publish.

    consumes    leased batches, each for a named step
    produces    commits, versions of the weights, metrics, checkpoints
    waits for   the batch of its step, until the run's deadline; it is asked for while the step before it trains
    unblocked by the hub, when enough groups are ready and none would expire

Blocking code; with several ranks each runs this loop in step, through the collectives of the trainer. Rank 0 commits.

Invariants:
- A step is committed before its version is published, so a version that engines serve is never taken back.
- A version is copied before the next step begins, and written and published while it runs (`publishing.py`). It is
  published before a checkpoint is saved, before the loop ends, and with `schedule.max_staleness` = 0 before the next
  batch is asked for, which is sampled from it.
- A checkpoint at step k covers the commits of steps 0..k-1, and its manifest is written last.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from headrace.actors.learner.ahead import BatchesAhead
from headrace.actors.learner.packing import build_step_batch
from headrace.actors.learner.publishing import Publishing
from headrace.engine.clock import Clock
from headrace.engine.config import Config
from headrace.engine.errors import StoppedError
from headrace.engine.interfaces import TrainerBackend
from headrace.engine.records import decode_column, decode_trajectory
from headrace.engine.transport.buffer_take import TakenBatch
from headrace.engine.transport.control import Span
from headrace.engine.types import PolicyVersion, StepBatch, WeightUpdate

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Hub(Protocol):
    """What the loop needs of the hub, all of it blocking."""

    def take(self, step: int, deadline_s: float) -> TakenBatch: ...

    def commit(self, step: int, lease_token: int, skipped: bool) -> PolicyVersion: ...

    def publish(self, part: WeightUpdate) -> bool: ...

    def report(self, step: int, spans: Sequence[Span], metrics: dict[str, float]) -> None: ...

    def doing(self, what: str) -> None: ...

    def say(self, text: str) -> None: ...


class Checkpoints(Protocol):
    """Saves on all ranks; returns when it is on disk."""

    def save(self, trainer: TrainerBackend, step: int) -> None: ...


class LearnerLoop:
    """Trains from `first_step` to the configured number of steps."""

    def __init__(
        self,
        *,
        config: Config,
        trainer: TrainerBackend,
        hub: Hub,
        checkpoints: Checkpoints,
        payload_dirs: Sequence[Path],
        rank: int,
        clock: Clock,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._hub = hub
        self._checkpoints = checkpoints
        self._rank = rank
        self._clock = clock
        self._spans: list[Span] = []
        self._publishing = Publishing(trainer, hub, payload_dirs, clock)
        self._batches = BatchesAhead(
            self._take,
            num_steps=config.run.steps,
            ahead=config.schedule.max_staleness > 0,
            wait_s=config.timeouts.no_progress_s,
            train_s=config.learner.step_timeout_s,
        )

    def run(self, first_step: int, *, publish_first: bool) -> None:
        """Train; returns when all steps are done or the hub says that the run is ending.

        Args:
            first_step: The step of the next batch.
            publish_first: Publish the current weights before the first step; a resumed run does, for its engines have
                only the base model.

        Raises:
            ActorLostError: The hub is gone.
            NonFiniteStreakError: Too many steps in a row were skipped.
        """
        try:
            if publish_first:
                self._spans += self._publishing.begin()
                self._spans += self._publishing.join()
            for step in range(first_step, self._config.run.steps):
                self._one_step(step)
            self._publishing.join()
        except StoppedError:
            log.info("the run is ending")
            self._publishing.leave()

    def _one_step(self, step: int) -> None:
        config = self._config
        self._hub.doing(f"waiting for the batch of step {step}")
        (lease_token, batch), wait_s = self._timed("wait", "learner", lambda: self._get(step))
        self._hub.doing(f"training step {step}")
        result, step_s = self._timed(f"step {step + 1}", "learner", lambda: self._trainer.step(batch))
        version = result.version
        if self._rank == 0:
            version = self._hub.commit(step, lease_token, result.skipped)
        began_s = self._clock.monotonic()
        if (step + 1) % config.schedule.weight_sync_steps == 0:
            self._hub.doing(f"publishing version {version}")
            self._spans += self._publishing.begin()
        if self._checkpoint_is_due(step + 1) or config.schedule.max_staleness == 0:
            self._spans += self._publishing.join()
        publish_s = self._clock.monotonic() - began_s
        metrics = dict(result.metrics)
        metrics |= {"timing_s/wait": wait_s, "timing_s/train": step_s, "timing_s/publish": publish_s}
        if self._checkpoint_is_due(step + 1):
            self._hub.doing(f"saving the checkpoint of step {step + 1}")
            saved = self._timed("checkpoint", "learner", lambda: self._checkpoints.save(self._trainer, step + 1))
            metrics["timing_s/checkpoint"] = saved[1]
        if self._rank == 0:
            self._hub.report(step + 1, self._spans, metrics)
        self._spans.clear()

    def _take(self, step: int, deadline_s: float) -> tuple[int, StepBatch]:
        """The lease's token and the packed batch of a step."""
        taken = self._hub.take(step, deadline_s)
        return taken.lease_token, step_batch(step, taken)

    def _get(self, step: int) -> tuple[int, StepBatch]:
        return self._batches.get(step, self._publishing.running)

    def _checkpoint_is_due(self, steps_done: int) -> bool:
        every = self._config.learner.checkpoint_steps
        return steps_done == self._config.run.steps or (every > 0 and steps_done % every == 0)

    def _timed(self, name: str, track: str, work: Callable[[], Result]) -> tuple[Result, float]:
        """Run and measure; the span goes to the hub with the step's report."""
        start_s, began_s = self._clock.wall(), self._clock.monotonic()
        result = work()
        took_s = self._clock.monotonic() - began_s
        self._spans.append(Span(track=track, name=name, start_s=start_s, end_s=start_s + took_s))
        return result, took_s


def step_batch(step: int, taken: TakenBatch) -> StepBatch:
    """Decode a rank's records and pack them as the plan says."""
    advantages: dict[str, float] = {}
    for record_id, columns in taken.columns.items():
        name, values = decode_column(columns["advantage"])
        assert name == "advantage"
        advantages[record_id] = float(values)
    trajectories = {record_id: decode_trajectory(data) for record_id, data in taken.records.items()}
    return build_step_batch(step=step, plan=taken, trajectories=trajectories, advantages=advantages)
