"""A learner rank without a model, for learner.launch = "external": python scripted_learner.py OPTIONS.

It looks for the hub's socket below the temporary folder, trains with a scripted trainer and saves real checkpoints.
"""

import faulthandler
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from headrace.actors.learner.checkpoint import CheckpointStore
from headrace.actors.learner.loop import LearnerLoop
from headrace.engine.clock import SystemClock
from headrace.engine.errors import HeadraceError
from headrace.engine.interfaces import TrainerBackend
from headrace.engine.testing import ScriptedTrainer
from headrace.engine.transport.control import BlockingControlClient, Joined
from headrace.engine.transport.learner import LearnerClient
from headrace.v1 import control_pb2 as pb


class Checkpoints:
    """Real checkpoints; each takes `save_s` seconds more."""

    def __init__(self, control: BlockingControlClient, run: Joined, save_s: float) -> None:
        self._store = CheckpointStore(Path(run.run_folder) / "checkpoints", keep=2, rank=0)
        self._control, self._run, self._save_s = control, run, save_s

    def save(self, trainer: TrainerBackend, step: int) -> None:
        state = self._control.checkpoint_state(step, self._run.fencing_token)
        time.sleep(self._save_s)
        self._store.save(trainer, step, {"hub.json": state.encode()})


def main(options: dict[str, Any]) -> None:
    hub = f"unix:{find_socket()}"
    with BlockingControlClient(hub, pb.ROLE_LEARNER, "learner-0") as control:
        run = control.join(0)
        trainer = ScriptedTrainer(
            run_id=run.run_id,
            version=run.version,
            num_weights=options.get("num_weights", 8),
            step_s=options.get("step_s", 0.0),
        )
        if run.resume_from:
            trainer.load(Path(run.resume_from))
            trainer.version = run.version
        line = LearnerClient(hub, control, run, 0, 1)
        control.progress.moved("ready", pb.PHASE_READY)
        loop = LearnerLoop(
            config=run.config,
            trainer=trainer,
            hub=line,
            checkpoints=Checkpoints(control, run, options.get("save_s", 0.0)),
            payload_dirs=(Path(run.payload_dir), Path(run.run_folder) / "weights"),
            rank=0,
            clock=SystemClock(),
        )
        try:
            loop.run(run.version.version, publish_first=bool(run.resume_from))
        finally:
            line.close()


def find_socket() -> Path:
    """The hub's socket, as soon as it is there: other programs have no event for that."""
    while True:
        for socket in Path(tempfile.gettempdir()).glob("headrace-*/hub"):
            return socket
        time.sleep(0.02)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    try:
        main(msgspec.json.decode(sys.argv[1]))
    except HeadraceError as error:  # the test looks at how the run ended
        sys.exit(f"{type(error).__name__}: {error}")
