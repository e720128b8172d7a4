"""The process of one learner rank: join, load, train to the end."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from headrace.actors.learner.checkpoint import CheckpointStore
from headrace.actors.learner.fsdp_trainer import FsdpTrainer
from headrace.actors.learner.loop import LearnerLoop
from headrace.actors.models import resolve_model
from headrace.engine.clock import SystemClock
from headrace.engine.config.resolve import algorithm_config
from headrace.engine.interfaces import Algorithm, TrainerBackend
from headrace.engine.plugins import load_entry_point
from headrace.engine.transport.control import BlockingControlClient, Joined
from headrace.engine.transport.learner import LearnerClient
from headrace.v1 import control_pb2 as pb

log = logging.getLogger(__name__)


def main(hub: str, member_id: str, rank: int, rendezvous: str) -> None:
    """Run one rank until the steps are done or the run ends. Entry of the child process.

    Args:
        hub: Address of the hub.
        member_id: Unique within the run.
        rank: 0 .. learner.num_ranks - 1.
        rendezvous: A file through which the ranks meet; it does not exist yet.

    Raises:
        ConfigError: The model cannot be loaded.
        RunError: See `LearnerLoop.run`.
    """
    run_rank(hub, member_id, rank, lambda run: _load(run, rank, rendezvous))


def run_rank(hub: str, member_id: str, rank: int, load: Callable[[Joined], TrainerBackend]) -> None:
    """Run one rank around a trainer of the caller's making; blocks until the steps are done or the run ends.

    Args:
        hub, member_id, rank: See `main`.
        load: Makes the trainer once the run is known; a resumed run's from `run.resume_from`.

    Raises:
        RunError: See `LearnerLoop.run`.
    """
    with BlockingControlClient(hub, pb.ROLE_LEARNER, member_id) as control:
        run = control.join(rank)
        control.progress.moved("loading the model", pb.PHASE_LOADING)
        trainer = load(run)
        try:
            _train(hub, control, run, trainer, rank)
        finally:
            trainer.close()


def _load(run: Joined, rank: int, rendezvous: str) -> FsdpTrainer:
    algorithm = cast(Any, load_entry_point("headrace.algorithms", run.config.algorithm.name))(
        algorithm_config(run.config)
    )
    trainer = FsdpTrainer.from_config(
        run.config,
        resolve_model(run.config.model.path),
        algorithm=cast(Algorithm, algorithm),
        rank=rank,
        num_ranks=run.config.learner.num_ranks,
        init_method=f"file://{rendezvous}",
        run_id=run.run_id,
        version=run.version,
    )
    if run.resume_from:
        trainer.load(Path(run.resume_from))
    return trainer


def _train(hub: str, control: BlockingControlClient, run: Joined, trainer: TrainerBackend, rank: int) -> None:
    num_ranks = run.config.learner.num_ranks
    width = getattr(trainer, "sharing_hidden_size", 0)  # a trainer of the caller's making need not have it
    line = LearnerClient(hub, control, run, rank, num_ranks, sharing_hidden_size=width)
    store = CheckpointStore(Path(run.run_folder) / "checkpoints", keep=run.config.learner.keep_checkpoints, rank=rank)
    loop = LearnerLoop(
        config=run.config,
        trainer=trainer,
        hub=line,
        checkpoints=Checkpoints(store, control, run, rank),
        payload_dirs=(Path(run.payload_dir), Path(run.run_folder) / "weights"),
        rank=rank,
        clock=SystemClock(),
    )
    control.progress.moved("ready", pb.PHASE_READY)
    try:
        loop.run(run.version.version, publish_first=bool(run.resume_from))
    finally:
        line.close()


class Checkpoints:
    """Saves the trainer on all ranks; rank 0 adds the hub's state before the manifest makes it complete."""

    def __init__(self, store: CheckpointStore, control: BlockingControlClient, run: Joined, rank: int) -> None:
        self._store = store
        self._control = control
        self._run = run
        self._rank = rank

    def save(self, trainer: TrainerBackend, step: int) -> None:
        extra: dict[str, bytes] = {}
        if self._rank == 0:
            extra["hub.json"] = self._control.checkpoint_state(step, self._run.fencing_token).encode()
        self._store.save(trainer, step, extra)
