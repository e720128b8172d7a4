"""Publishing versions while the next step trains.

    consumes    the trainer's weights, copied between two steps
    produces    this rank's parts of their updates, at the hub
    waits for   the copy; the update before, of which at most one is under way
    unblocked by the hub, which answers each part

Invariants:

- A version is published after the one before was taken or refused; all ranks have got so far when they copy the next,
  for copying is collective. So the base of a delta is sealed by then.
- An error of the thread is raised in the loop: at the next `begin` or `join`, or while a batch is awaited.

A trainer that cannot copy its weights (`OverlappedTrainer`) exports and publishes before the next step.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Protocol

from headrace.engine.clock import Clock
from headrace.engine.interfaces import OverlappedTrainer, StagedUpdate, TrainerBackend
from headrace.engine.transport.control import Span
from headrace.engine.types import PolicyVersion, WeightUpdate
from headrace.engine.weights.handover import Handover


class Hub(Protocol):
    """What publishing needs of the hub; blocking, and called in another thread."""

    def publish(self, part: WeightUpdate) -> bool: ...

    def say(self, text: str) -> None: ...


class Publishing:
    """Publishes a trainer's versions, at most one at a time. For the loop's thread.

    Args:
        trainer: Whose weights.
        hub, payload_dirs: See `Handover`.
        clock: For the spans.
    """

    def __init__(self, trainer: TrainerBackend, hub: Hub, payload_dirs: Sequence[Path], clock: Clock) -> None:
        self._trainer = trainer
        self._handover = Handover(hub, payload_dirs, hub.say)
        self._clock = clock
        self._running: Future[Span] | None = None

    @property
    def running(self) -> Future[Span] | None:
        """What is under way; fails as publishing does."""
        return self._running

    def begin(self) -> list[Span]:
        """Copy the weights and publish them. Collective; blocks for the update before and for the copy.

        Returns:
            The span of the update before, if it was not known yet.

        Raises:
            HeadraceError: What publishing the version before raised, or copying this one.
        """
        spans = self.join()
        start_s = self._clock.wall()
        since = self._handover.since
        future: Future[Span] = Future()
        if isinstance(self._trainer, OverlappedTrainer):
            staged = self._trainer.stage_update(since)
            arguments = (future, staged, start_s)
            threading.Thread(target=self._work, args=arguments, name="publish weights", daemon=True).start()
        else:
            self._work(future, _Exported(self._trainer, since), start_s)
        self._running = future
        return spans

    def join(self) -> list[Span]:
        """Wait for the update that is under way, if any; returns its span.

        Raises:
            HeadraceError: What publishing it raised.
        """
        running, self._running = self._running, None
        return [] if running is None else [running.result()]

    def leave(self, limit_s: float = 10.0) -> None:
        """The run is ending: let what is under way come to its end, whichever, for a while."""
        if self._running is not None:
            wait({self._running}, timeout=limit_s)

    def _work(self, future: Future[Span], staged: StagedUpdate, start_s: float) -> None:
        try:
            self._handover.publish(staged)
        except BaseException as error:  # raised again in the loop
            future.set_exception(error)
            return
        name = f"publish v{staged.version}"
        future.set_result(Span(track="weights", name=name, start_s=start_s, end_s=self._clock.wall()))


class _Exported:
    """The weights of a trainer that exports them on the spot; its version is known once they are written."""

    def __init__(self, trainer: TrainerBackend, since: PolicyVersion | None) -> None:
        self._trainer = trainer
        self._since = since
        self._update: WeightUpdate | None = None

    @property
    def version(self) -> PolicyVersion:
        assert self._update is not None, "write it first"
        return self._update.manifest.version

    def write(self, payload_dir: Path, *, full: bool = False) -> WeightUpdate:
        self._update = self._trainer.export_update(None if full else self._since, payload_dir)
        return self._update

    def settle(self, *, accepted: bool) -> None:
        """Nothing is kept: the next export's `since` says it."""
