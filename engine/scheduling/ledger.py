"""The group ledger: every group that was ever admitted ends exactly once, trained or dropped for a reason.

    admitted -> dispatched -> generated -> scored -> ready -> leased -> trained
        any state but the last: requeued (back to admitted, attempt + 1) or dropped

Invariants:

1. admitted = unfinished + trained + dropped, at all times, in exact counts.
2. A finished group never changes again, and an id is never admitted twice while the ledger remembers it.
3. An event counts for the attempt that it names: one of an earlier attempt (the late result of a lost worker), or for a
   finished group, changes nothing and is counted as late. One that has already happened changes nothing and is counted
   as repeated.
4. Memory is bounded by the unfinished groups plus `keep_finished`; older finished groups live on in the counts alone.

Owns no clock: times are passed in and only kept.
"""

import enum
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.engine.errors import InputError
from headrace.engine.types import DropReason

# A group's events are few; the bound is for one whose lease goes back and forth.
HISTORY_EVENTS = 64


class GroupState(enum.IntEnum):
    """Where a group is; the order is that of its path."""

    ADMITTED = 0
    DISPATCHED = 1
    GENERATED = 2
    SCORED = 3
    READY = 4
    LEASED = 5
    TRAINED = 6
    DROPPED = 7


# What a state may follow. A group that a client has generated is never dispatched, and one that needs no score is ready
# as soon as it is generated.
_MAY_FOLLOW = {
    GroupState.DISPATCHED: (GroupState.ADMITTED,),
    GroupState.GENERATED: (GroupState.ADMITTED, GroupState.DISPATCHED),
    GroupState.SCORED: (GroupState.GENERATED,),
    GroupState.READY: (GroupState.GENERATED, GroupState.SCORED),
    GroupState.LEASED: (GroupState.READY,),
    GroupState.TRAINED: (GroupState.LEASED,),
}


class GroupEvent(NamedTuple):
    """One thing that happened to a group. `detail` is the worker, the step, or the reason."""

    state: GroupState
    attempt: int
    at_s: float
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Exact counts since the ledger began.

    Attributes:
        admitted: Groups ever admitted.
        unfinished: Groups by the state they are in; finished states are not in it.
        trained: Groups that ended in a step.
        dropped: Groups that ended otherwise, by reason.
        requeued: New attempts.
        late: Events of an earlier attempt or for a finished group.
        repeated: Events that had already happened.
    """

    admitted: int
    unfinished: dict[GroupState, int]
    trained: int
    dropped: dict[DropReason, int]
    requeued: int
    late: int
    repeated: int


@dataclass(slots=True)
class _Group:
    attempt: int = 0
    state: GroupState = GroupState.ADMITTED
    worker: str | None = None
    step: int | None = None
    events: deque[GroupEvent] = field(default_factory=lambda: deque(maxlen=HISTORY_EVENTS))


class GroupLedger:
    """Follows each group from admission to its one end.

    Every event method returns whether it changed anything; False means that it was late or repeated.

    Args:
        retries: New attempts that a group may have.
        keep_finished: Finished groups that are remembered one by one.
    """

    def __init__(self, retries: int = 3, keep_finished: int = 10_000) -> None:
        if retries < 0 or keep_finished < 0:
            raise InputError(f"retries {retries} and keep_finished {keep_finished} were given; both must be at least 0")
        self.retries = retries
        self.keep_finished = keep_finished
        self._groups: dict[str, _Group] = {}
        self._finished: dict[str, GroupEvent] = {}  # oldest first
        self._admitted = 0
        self._trained = 0
        self._dropped: Counter[DropReason] = Counter()
        self._requeued = 0
        self._late = 0
        self._repeated = 0

    def admit(self, group_id: str, at_s: float) -> None:
        """Begin a group at attempt 0.

        Raises:
            InputError: The ledger knows the id already.
        """
        if group_id in self._groups or group_id in self._finished:
            raise InputError(f"group {group_id!r} was admitted before; give each group an id of its own")
        group = self._groups[group_id] = _Group()
        group.events.append(GroupEvent(GroupState.ADMITTED, 0, at_s))
        self._admitted += 1

    def dispatched(self, group_id: str, attempt: int, worker: str, at_s: float) -> bool:
        """A worker took the group on."""
        group = self._move(group_id, attempt, GroupState.DISPATCHED, at_s, worker)
        if group is not None:
            group.worker = worker
        return group is not None

    def generated(self, group_id: str, attempt: int, at_s: float) -> bool:
        """All samples of the group are durable."""
        group = self._move(group_id, attempt, GroupState.GENERATED, at_s)
        if group is not None:
            group.worker = None
        return group is not None

    def scored(self, group_id: str, attempt: int, at_s: float) -> bool:
        """All samples have a reward; other columns may be missing."""
        return self._move(group_id, attempt, GroupState.SCORED, at_s) is not None

    def ready(self, group_id: str, attempt: int, at_s: float) -> bool:
        """Every column that training needs is there."""
        return self._move(group_id, attempt, GroupState.READY, at_s) is not None

    def leased(self, group_id: str, attempt: int, step: int, at_s: float) -> bool:
        """The group is in the batch of a step."""
        group = self._move(group_id, attempt, GroupState.LEASED, at_s, str(step))
        if group is not None:
            group.step = step
        return group is not None

    def released(self, group_id: str, attempt: int, at_s: float) -> bool:
        """The lease was given back; the group is ready again."""
        group = self._current(group_id, attempt)
        if group is None:
            return False
        if group.state is not GroupState.LEASED:
            self._repeated += 1
            return False
        group.step = None
        self._enter(group, GroupState.READY, at_s, "released")
        return True

    def trained(self, group_id: str, attempt: int, step: int, at_s: float) -> bool:
        """The step that leased the group is committed: one of the two ends.

        Raises:
            InputError: The group is leased for another step, or not at all.
        """
        group = self._current(group_id, attempt)
        if group is None:
            return False
        if group.state is not GroupState.LEASED or group.step != step:
            held = f"leased for step {group.step}" if group.step is not None else group.state.name.lower()
            raise InputError(f"group {group_id!r} was reported as trained at step {step}, but it is {held}")
        self._finish(group_id, GroupEvent(GroupState.TRAINED, attempt, at_s, str(step)))
        self._trained += 1
        return True

    def requeued(self, group_id: str, attempt: int, at_s: float, why: str, otherwise: DropReason) -> int | None:
        """Give the group a new attempt, or drop it if it has had them all.

        Args:
            group_id: A group that was admitted.
            attempt: The attempt that failed; of an earlier one nothing is done, and the current one is returned.
            at_s: When.
            why: For the history.
            otherwise: Why it is dropped if no attempt is left.

        Returns:
            The attempt that is current now; None if the group is finished.
        """
        group = self._current(group_id, attempt)
        if group is None:
            return self._groups[group_id].attempt if group_id in self._groups else None
        if group.attempt >= self.retries:
            self.dropped(group_id, attempt, otherwise, at_s)
            return None
        group.attempt += 1
        group.worker = group.step = None
        self._requeued += 1
        self._enter(group, GroupState.ADMITTED, at_s, why)
        return group.attempt

    def dropped(self, group_id: str, attempt: int, reason: DropReason, at_s: float) -> bool:
        """The group will not be trained on: the other end, from any state."""
        if self._current(group_id, attempt) is None:
            return False
        self._finish(group_id, GroupEvent(GroupState.DROPPED, attempt, at_s, reason.value))
        self._dropped[reason] += 1
        return True

    def state(self, group_id: str) -> GroupState:
        """Where the group is.

        Raises:
            InputError: It was never admitted, or finished so long ago that only the counts remember it.
        """
        if group_id in self._finished:
            return self._finished[group_id].state
        return self._known(group_id).state

    def attempt(self, group_id: str) -> int:
        """The current attempt, or the last one of a finished group."""
        return self._finished[group_id].attempt if group_id in self._finished else self._known(group_id).attempt

    def history(self, group_id: str) -> tuple[GroupEvent, ...]:
        """What happened, oldest first: the last `HISTORY_EVENTS` events, or for a finished group how it ended."""
        if group_id in self._finished:
            return (self._finished[group_id],)
        return tuple(self._known(group_id).events)

    def unfinished(self, worker: str | None = None) -> list[str]:
        """Groups that have not ended, in order of admission; with a worker, those that it has to generate."""
        return [name for name, group in self._groups.items() if worker is None or group.worker == worker]

    def counts(self) -> LedgerCounts:
        """Exact counts; costs time in proportion to the unfinished groups."""
        return LedgerCounts(
            admitted=self._admitted,
            unfinished=dict(Counter(group.state for group in self._groups.values())),
            trained=self._trained,
            dropped=dict(self._dropped),
            requeued=self._requeued,
            late=self._late,
            repeated=self._repeated,
        )

    def _known(self, group_id: str) -> _Group:
        group = self._groups.get(group_id)
        if group is None:
            raise InputError(f"group {group_id!r} is unknown: it was never admitted, or finished long ago")
        return group

    def _current(self, group_id: str, attempt: int) -> _Group | None:
        """The group, if the event is for its current attempt; None, and counted, if it is late."""
        if group_id in self._finished:
            self._late += 1
            return None
        group = self._known(group_id)
        if attempt > group.attempt:
            raise InputError(f"group {group_id!r} has no attempt {attempt}; the current one is {group.attempt}")
        if attempt < group.attempt:
            self._late += 1
            return None
        return group

    def _move(self, group_id: str, attempt: int, state: GroupState, at_s: float, detail: str = "") -> _Group | None:
        group = self._current(group_id, attempt)
        if group is None:
            return None
        if group.state >= state:
            self._repeated += 1
            return None
        if group.state not in _MAY_FOLLOW[state]:
            raise InputError(f"group {group_id!r} cannot be {state.name.lower()}: it is {group.state.name.lower()}")
        self._enter(group, state, at_s, detail)
        return group

    def _enter(self, group: _Group, state: GroupState, at_s: float, detail: str) -> None:
        group.state = state
        group.events.append(GroupEvent(state, group.attempt, at_s, detail))

    def _finish(self, group_id: str, event: GroupEvent) -> None:
        del self._groups[group_id]
        self._finished[group_id] = event
        if len(self._finished) > self.keep_finished:
            del self._finished[next(iter(self._finished))]
