"""The way of every group through a run: one object over the staleness window, the ledger and the dispatch queues.

A pure state machine: it owns no task, socket or clock (times come from the clock that is passed in) and decides nothing
that those three do not decide; it keeps them in step.

Invariants:
- A group is in the window exactly while the ledger calls it unfinished.
- A training group that waits for a worker or is in flight at one is in the dispatch queue; no other is.
- What a worker says of an earlier attempt changes nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from headrace.engine.clock import Clock
from headrace.engine.config import Config
from headrace.engine.scheduling.inflight import DispatchQueue
from headrace.engine.scheduling.ledger import GroupLedger, GroupState
from headrace.engine.scheduling.staleness import Stage, StalenessWindow
from headrace.engine.types import (
    DropReason,
    GroupOutcome,
    PolicyVersion,
    Prompt,
    PromptGroup,
    SamplingParams,
    VersionSpan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """A group to send to a worker."""

    worker: str
    group: PromptGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A group that has left: what to tell the prompt source. `worker` still runs it, if named, and must be told."""

    prompt_id: str
    outcome: GroupOutcome
    worker: str | None = None


class GroupFlow:
    """Groups of the training table, from admission to their one end.

    Args:
        config: Of the run.
        start: The version that the run begins with; its number is the first step.
        clock: Read for the ledger's times.
    """

    def __init__(self, config: Config, start: PolicyVersion, clock: Clock) -> None:
        schedule = config.schedule
        self.window = StalenessWindow(
            schedule.groups_per_step,
            schedule.max_staleness,
            schedule.weight_sync_steps,
            schedule.staleness_measure,
            schedule.stale_policy,
            start=start,
        )
        self.ledger = GroupLedger(retries=config.rollout.request_retries)
        self.queue = DispatchQueue(limit=schedule.max_inflight or None)
        self._config = config
        self._clock = clock
        self._start = start
        self._groups: dict[str, PromptGroup] = {}
        self._workers: set[str] = set()
        self._num_admitted = 0

    @property
    def sampling(self) -> SamplingParams:
        """How training groups are sampled."""
        rollout = self._config.rollout
        return SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=rollout.max_tokens,
            stop=rollout.stop,
        )

    # Admission

    def may_admit(self) -> bool:
        """The window has room, and steps are left for which no group is there yet."""
        steps_left = self._config.run.steps - self.window.step
        return len(self.window) < steps_left * self.window.groups_per_step and self.window.can_admit()

    def admit(self, prompt: Prompt) -> PromptGroup:
        """Begin a group for a prompt; it waits for a worker. Only after `may_admit`."""
        self._num_admitted += 1
        group_id = f"g{self._start.incarnation}-{self._num_admitted:06d}"
        self.ledger.admit(group_id, self._clock.wall())
        group = PromptGroup(
            group_id=group_id,
            prompt=prompt,
            group_size=self._config.schedule.group_size,
            min_version=self.window.admit(group_id),
            sampling=self.sampling,
        )
        self._groups[group_id] = group
        self.queue.push(group_id, group.min_version)
        return group

    # Dispatch

    def next_dispatch(self) -> Dispatch | None:
        """The next group to send, in flight from now on; None when no worker can take one."""
        for group_id, version in self.window.restamped().items():
            self._groups[group_id] = msgspec.structs.replace(self._groups[group_id], min_version=version)
            self.queue.set_min_version(group_id, version)
        assignment = self.queue.next_assignment()
        if assignment is None:
            return None
        group = self._groups[assignment.group_id]
        self.window.started(group.group_id, assignment.serving)
        self.ledger.dispatched(group.group_id, group.attempt, assignment.worker, self._clock.wall())
        return Dispatch(worker=assignment.worker, group=group)

    def enlist(self, worker: str, num_groups: int, serving: PolicyVersion) -> None:
        """A worker takes so many groups at a time and serves this version; called again, either may have changed."""
        if worker in self._workers:
            self.queue.set_credits(worker, num_groups)
            self.queue.set_version(worker, serving)
        else:
            self._workers.add(worker)
            self.queue.add_worker(worker, num_groups, serving)

    def drain(self, worker: str) -> None:
        """Give a worker nothing more; one that has not said yet what it can do has nothing anyway."""
        if worker in self._workers:
            self.queue.drain(worker)

    def in_flight(self, worker: str) -> list[PromptGroup]:
        """The groups that a worker has to generate; none for an unknown worker."""
        return [self._groups[name] for name in self.queue.in_flight(worker)] if worker in self._workers else []

    def worker_lost(self, worker: str) -> list[Ended]:
        """A worker is gone: its groups begin anew elsewhere, or are dropped when they have no attempt left."""
        ended: list[Ended] = []
        if worker not in self._workers:
            return ended
        self._workers.remove(worker)
        for group_id in self.queue.in_flight(worker):
            group = self._groups[group_id]
            ended += self.requeue(group_id, group.attempt, f"worker {worker} was lost", DropReason.ROLLOUT_FAILED)
        self.queue.worker_lost(worker)
        return ended

    # What becomes of it

    def is_current(self, group_id: str, attempt: int) -> bool:
        """The group is unfinished and this is its attempt."""
        group = self._groups.get(group_id)
        return group is not None and group.attempt == attempt

    def group(self, group_id: str) -> PromptGroup | None:
        """The unfinished group, at its current attempt."""
        return self._groups.get(group_id)

    def generated(self, group_id: str, attempt: int, samples: Iterable[Sequence[VersionSpan]]) -> bool:
        """All records of the group are in the table; False when that was known or is late."""
        if not self.is_current(group_id, attempt):
            return False
        if not self.ledger.generated(group_id, attempt, self._clock.wall()):
            return False
        self.queue.finished(group_id)
        self.window.generated(group_id, self.window.rule.measured(samples))
        return True

    def ready(self, group_id: str, attempt: int) -> None:
        """Every required column is there."""
        if self.is_current(group_id, attempt):
            self.ledger.scored(group_id, attempt, self._clock.wall())
            self.ledger.ready(group_id, attempt, self._clock.wall())
            self.window.ready(group_id)

    def requeue(self, group_id: str, attempt: int, why: str, otherwise: DropReason) -> list[Ended]:
        """Give the group a new attempt, or drop it for `otherwise` when it has had them all.

        Returns:
            The end of the group if it was dropped, with the worker that still runs it.
        """
        if not self.is_current(group_id, attempt):
            return []
        before = self.ledger.state(group_id)
        attempt_now = self.ledger.requeued(group_id, attempt, self._clock.wall(), why, otherwise)
        if attempt_now is None:
            return [self._leave(group_id, otherwise, before)]
        version = self.window.requeued(group_id)
        group = self._groups[group_id]
        self._groups[group_id] = msgspec.structs.replace(group, attempt=attempt_now, min_version=version)
        match before:
            case GroupState.ADMITTED:
                self.queue.set_min_version(group_id, version)
            case GroupState.DISPATCHED:
                self.queue.returned(group_id)
                self.queue.set_min_version(group_id, version)
            case _:
                self.queue.push(group_id, version)
        return []

    def drop(self, group_id: str, attempt: int, reason: DropReason) -> list[Ended]:
        """End the group untrained."""
        if not self.is_current(group_id, attempt):
            return []
        before = self.ledger.state(group_id)
        self.ledger.dropped(group_id, attempt, reason, self._clock.wall())
        return [self._leave(group_id, reason, before)]

    def _leave(self, group_id: str, reason: DropReason, before: GroupState) -> Ended:
        worker = self.queue.cancel(group_id) if before <= GroupState.DISPATCHED else None
        self.window.dropped(group_id)
        group = self._groups.pop(group_id)
        outcome = GroupOutcome(group_id=group_id, dropped=reason)
        return Ended(prompt_id=group.prompt.prompt_id, outcome=outcome, worker=worker)

    # Batches

    def choose(self, ready: Sequence[str], step: int) -> list[str] | None:
        """The groups that `step` trains on, or None while they are not all there or the step has to wait.

        The step after the current one can be asked for too, unless on-policy: its groups do not exist yet.
        """
        if not 0 <= step - self.window.step <= min(1, self._config.schedule.max_staleness):
            return None
        batch = self.window.select([group_id for group_id in ready if group_id in self.window], step)
        batch = batch[: self.window.groups_per_step]
        if len(batch) < self.window.groups_per_step or self.window.may_begin(step, batch):
            return None
        return batch

    def blockers(self, ready: Sequence[str], step: int) -> list[str]:
        """Unfinished groups that keep `step` from beginning although enough are ready."""
        batch = self.window.select([group_id for group_id in ready if group_id in self.window], step)
        return self.window.may_begin(step, batch[: self.window.groups_per_step])

    def expired(self, step: int, batch: Sequence[str] = ()) -> list[tuple[str, int]]:
        """Groups, with their attempts, that no step to come may train on.

        Args:
            step: The current one, or the next.
            batch: The groups chosen for it; without them only what is too old already is named.
        """
        doomed = self.window.doomed(step, batch) if batch else []
        names = dict.fromkeys([*self.window.stale(), *doomed])
        return [(name, self._groups[name].attempt) for name in names if name in self._groups]

    def leased(self, group_ids: Iterable[str], step: int) -> None:
        """The groups are the batch of `step`."""
        for group_id in group_ids:
            self.window.leased(group_id, step)
            self.ledger.leased(group_id, self._groups[group_id].attempt, step, self._clock.wall())

    def released(self, group_ids: Iterable[str]) -> None:
        """A lease was given back: the groups are ready again."""
        for group_id in group_ids:
            self.window.released(group_id)
            self.ledger.released(group_id, self._groups[group_id].attempt, self._clock.wall())

    def trained(self, step: int) -> list[Ended]:
        """The step is committed (a skipped one too); the next step is current."""
        ended: list[Ended] = []
        for group_id in self.window.trained(step):
            group = self._groups.pop(group_id)
            self.ledger.trained(group_id, group.attempt, step, self._clock.wall())
            outcome = GroupOutcome(group_id=group_id, trained_at_step=step)
            ended.append(Ended(prompt_id=group.prompt.prompt_id, outcome=outcome))
        return ended

    # Figures

    def num_in_flight(self) -> int:
        """Groups admitted and not yet ready."""
        counts = self.window.counts()
        return counts[Stage.QUEUED] + counts[Stage.RUNNING] + counts[Stage.GENERATED]

    def num_ready(self) -> int:
        """Groups that wait to be trained on."""
        return self.window.counts()[Stage.READY]
