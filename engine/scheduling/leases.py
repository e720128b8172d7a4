"""Who may train on what, for which step: leases with fencing tokens. A pure state machine.

Invariants:
    * An item is in at most one place: a live lease, a held (committed, not yet covered) batch, or a replay.
    * Tokens strictly grow and are never used twice; a step has at most one live lease.
    * Steps are committed in order, each exactly once; a retry with the same token gets the same answer.
    * A consumer's incarnation only grows. Everything that an older or lost incarnation asks for is refused.
    * Only three things end a lease: its commit, its release, and the proven death (or succession) of its incarnation.
      No clock takes part: a stopped optimizer step may go on after any pause.
    * The batch of a rewound step is pinned to that step: it never returns to the pool before it is committed again.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.engine.errors import FencedError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A batch given to one incarnation of a consumer for one step.

    Attributes:
        token: Fences commit, release, publish and checkpoint; larger than every token before it.
        items: What is leased, in the order it was chosen (ids of whole groups).
        replay: The batch was committed before and belongs to this step for good.
    """

    step: int
    token: int
    consumer_id: str
    incarnation: int
    items: tuple[str, ...]
    replay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What a commit did.

    Attributes:
        first: False for the retry of a commit that had already happened.
        freed: Items that nothing needs any more; empty while a checkpointer holds them, and for a retry.
    """

    step: int
    first: bool
    freed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Ended:
    step: int
    consumer_id: str
    incarnation: int
    committed: bool


class LeaseTable:
    """Leases of one table. Owns no task, socket or clock.

    Args:
        first_step: The step that is committed first.
        first_token: Where tokens start; a restarted hub passes one more than the last it gave out.
        remember: How many ended leases are remembered, so that a retry is answered and not refused.
    """

    def __init__(self, *, first_step: int = 0, first_token: int = 1, remember: int = 256) -> None:
        if first_step < 0 or first_token < 1 or remember < 1:
            raise UsageError(
                f"a lease table needs first_step >= 0, first_token >= 1 and remember >= 1, "
                f"got {first_step}, {first_token} and {remember}"
            )
        self._next_step = first_step
        self._next_token = first_token
        self._remember = remember
        self._live: dict[int, Lease] = {}
        self._steps: dict[int, int] = {}
        self._ended: dict[int, _Ended] = {}
        # The smallest incarnation of each consumer that is still listened to.
        self._floor: dict[str, int] = {}
        self._held: dict[int, tuple[str, ...]] = {}
        self._replays: dict[int, tuple[str, ...]] = {}
        self._holding = False
        self._covered = first_step - 1

    @property
    def next_step(self) -> int:
        """The step whose commit comes next."""
        return self._next_step

    @property
    def covered_step(self) -> int:
        """The last step that a durable checkpoint covers."""
        return self._covered

    @property
    def live(self) -> tuple[Lease, ...]:
        """Leases that are neither committed nor returned, by token."""
        return tuple(self._live.values())

    @property
    def held(self) -> dict[int, tuple[str, ...]]:
        """Committed batches that wait for a checkpoint, by step."""
        return dict(self._held)

    def hold_for_checkpoints(self) -> None:
        """Keep what is committed from now on until `checkpoint_covers` names its step."""
        self._holding = True

    def enter(self, consumer_id: str, incarnation: int) -> tuple[str, ...]:
        """Let an incarnation speak; an older one of the same consumer is fenced from now on.

        Returns:
            The items that its predecessors had leased; they go back to the pool.

        Raises:
            FencedError: A newer incarnation is known, or this one was declared lost.
        """
        floor = self._floor.get(consumer_id, incarnation)
        if incarnation < floor:
            raise FencedError(
                f"incarnation {incarnation} of consumer {consumer_id!r} is fenced: only {floor} or newer is served; "
                f"stop this process and let its successor go on"
            )
        self._floor[consumer_id] = incarnation
        return self._return(
            lease for lease in self.live if lease.consumer_id == consumer_id and lease.incarnation < incarnation
        )

    def find(self, step: int, consumer_id: str, incarnation: int) -> Lease | None:
        """The lease that this incarnation already has for `step`, if any. Call `enter` first.

        Raises:
            FencedError: The step is committed, or leased to another consumer.
        """
        if step < self._next_step:
            raise FencedError(f"step {step} is already committed; the next step is {self._next_step}")
        token = self._steps.get(step)
        if token is None:
            return None
        lease = self._live[token]
        if (lease.consumer_id, lease.incarnation) != (consumer_id, incarnation):
            raise FencedError(
                f"step {step} is leased to incarnation {lease.incarnation} of {lease.consumer_id!r}, "
                f"not to {incarnation} of {consumer_id!r}; release it there first"
            )
        return lease

    def replay(self, step: int) -> tuple[str, ...] | None:
        """The batch that `step` must get again after a rewind; None when it may be chosen freely."""
        return self._replays.get(step)

    def grant(self, step: int, consumer_id: str, incarnation: int, items: Iterable[str]) -> Lease:
        """Lease items for a step; the caller has called `enter` and got None from `find`.

        Raises:
            FencedError: As `enter` and `find` do.
            UsageError: No items, an item twice, or items of another batch for a step that is replayed.
        """
        if self._floor.get(consumer_id) != incarnation:
            self.enter(consumer_id, incarnation)
        if self.find(step, consumer_id, incarnation) is not None:
            raise UsageError(f"step {step} is already leased; use the lease that there is")
        chosen = tuple(items)
        pinned = self._replays.get(step)
        if not chosen or len(set(chosen)) != len(chosen):
            raise UsageError(f"a lease for step {step} needs distinct items, got {len(chosen)}")
        if pinned is not None and chosen != pinned:
            raise UsageError(f"step {step} is replayed and must get the batch it had before")
        if pinned is None:
            self._refuse_taken(step, chosen)
        lease = Lease(
            step=step,
            token=self._next_token,
            consumer_id=consumer_id,
            incarnation=incarnation,
            items=chosen,
            replay=pinned is not None,
        )
        self._next_token += 1
        self._live[lease.token] = lease
        self._steps[step] = lease.token
        return lease

    def commit(self, step: int, token: int) -> Commit:
        """Consume the batch of a step. The same call again changes nothing and answers the same.

        Raises:
            FencedError: The token is not that of the step's lease, was released, or its incarnation is fenced.
            UsageError: An earlier step is not committed yet.
        """
        lease = self._live.get(token)
        if lease is None or lease.step != step:
            return self._committed_before(step, token)
        if step != self._next_step:
            raise UsageError(f"step {step} cannot be committed before step {self._next_step}")
        self._end(lease, committed=True)
        self._next_step += 1
        self._replays.pop(step, None)
        if not self._holding:
            self._covered = step
            return Commit(step=step, first=True, freed=lease.items)
        self._held[step] = lease.items
        return Commit(step=step, first=True, freed=())

    def release(self, step: int, token: int) -> tuple[str, ...]:
        """Give a batch back untrained; the same call again changes nothing.

        Returns:
            The items that go back to the pool; none for a replayed step, whose batch stays pinned to it.

        Raises:
            FencedError: The token is not that of the step's lease, was committed, or its incarnation is fenced.
        """
        lease = self._live.get(token)
        if lease is not None and lease.step == step:
            return self._return([lease])
        ended = self._remembered(step, token)
        if ended.committed:
            raise FencedError(f"step {step} is committed and cannot be given back")
        return ()

    def consumer_lost(self, consumer_id: str, incarnation: int) -> tuple[str, ...]:
        """An incarnation is proven dead: fence it and its elders. Returns the items that go back to the pool."""
        self._floor[consumer_id] = max(self._floor.get(consumer_id, 0), incarnation + 1)
        return self._return(
            lease for lease in self.live if lease.consumer_id == consumer_id and lease.incarnation <= incarnation
        )

    def checkpoint_covers(self, step: int) -> tuple[str, ...]:
        """A durable checkpoint holds the effect of all steps up to this one. Returns the items that are freed."""
        self._covered = max(self._covered, min(step, self._next_step - 1))
        covered = [held for held in self._held if held <= step]
        return tuple(item for held in covered for item in self._held.pop(held))

    def rewind(self, step: int) -> tuple[str, ...]:
        """Go back to a checkpoint: `step` is committed next, and the held batches from there on are replayed in order.

        Returns:
            The items of live leases that were not replays; they go back to the pool, and their tokens are void.

        Raises:
            UsageError: The step lies ahead, or a batch that would have to be replayed is no longer held.
        """
        if step > self._next_step:
            raise UsageError(f"cannot rewind to step {step}: the next step is {self._next_step}")
        gone = [lost for lost in range(step, self._next_step) if lost not in self._held]
        if gone:
            raise UsageError(
                f"cannot rewind to step {step}: the batch of step {gone[0]} is no longer held; "
                f"rewind to {self._covered + 1} or later"
            )
        returned = self._return(self.live)
        for replayed in range(step, self._next_step):
            self._replays[replayed] = self._held.pop(replayed)
        # A commit from the lost future is no longer an answer to anyone.
        self._ended = {token: ended for token, ended in self._ended.items() if ended.step < step}
        self._next_step = step
        return returned

    def _refuse_taken(self, step: int, chosen: tuple[str, ...]) -> None:
        wanted = set(chosen)
        batches = [lease.items for lease in self._live.values()]
        for taken in (*batches, *self._held.values(), *self._replays.values()):
            twice = wanted.intersection(taken)
            if twice:
                raise UsageError(f"item {min(twice)!r} cannot be leased for step {step}: it belongs to another batch")

    def _return(self, leases: Iterable[Lease]) -> tuple[str, ...]:
        returned: list[str] = []
        for lease in leases:
            self._end(lease, committed=False)
            if not lease.replay:
                returned.extend(lease.items)
        return tuple(returned)

    def _end(self, lease: Lease, *, committed: bool) -> None:
        del self._live[lease.token]
        del self._steps[lease.step]
        self._ended[lease.token] = _Ended(lease.step, lease.consumer_id, lease.incarnation, committed)
        while len(self._ended) > self._remember:
            del self._ended[next(iter(self._ended))]

    def _remembered(self, step: int, token: int) -> _Ended:
        ended = self._ended.get(token)
        if ended is None or ended.step != step:
            raise FencedError(f"token {token} is not the lease of step {step}; take the step again")
        floor = self._floor[ended.consumer_id]
        if ended.incarnation < floor:
            raise FencedError(
                f"token {token} of step {step} belongs to incarnation {ended.incarnation} of {ended.consumer_id!r}, "
                f"which is fenced: only {floor} or newer is served"
            )
        return ended

    def _committed_before(self, step: int, token: int) -> Commit:
        if not self._remembered(step, token).committed:
            raise FencedError(f"token {token} of step {step} was given back; take the step again")
        return Commit(step=step, first=False, freed=())
