"""A table with waiting: puts that wait for room, takes that wait for whole groups, leases around both.

Consumes puts, columns, commits and news of consumers; produces leases; waits for room (producers) and for ready groups
(consumers). Room comes from commits, checkpoints and drops; ready groups from puts, columns and returned leases.

Invariants:
    * Nothing polls: each change wakes exactly those who wait for it.
    * Groups begin in the order in which their first records asked for room; records of begun groups need not queue.
    * A wait that ends, by success, deadline or cancellation, leaves nothing behind.
    * The table's groups are leased exactly while the lease table says so.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from headrace.buffers.groups import PutStatus, PutVerdict, ReadyGroup
from headrace.buffers.stats import TableStats
from headrace.buffers.table import Table
from headrace.engine.clock import Clock, SystemClock
from headrace.engine.errors import DeadlineError, UsageError
from headrace.engine.hub.waits import Wait, WaitBoard
from headrace.engine.scheduling.leases import Commit, Lease, LeaseTable
from headrace.engine.types.records import RecordHeader

T = TypeVar("T")
Choose = Callable[[list[ReadyGroup]], list[str] | None]

_NAMED_GROUPS = 8  # so many unfinished groups are named in an error


@dataclass(eq=False, slots=True)
class _Putter:
    header: RecordHeader
    data: bytes
    verdict: asyncio.Future[PutVerdict]


class AsyncTable:
    """One table and its leases on one event loop. Not for use from several threads.

    Args:
        table: The records; changed through this object alone.
        leases: Who has leased what.
        clock: For deadlines as the list of waits shows them.
        board: Lists the waits; its own by default.
        describe_missing: Sentences on groups that are not in the table at all (running, lost, ...), for errors of waits
            that reach their deadline.
    """

    def __init__(
        self,
        table: Table,
        leases: LeaseTable | None = None,
        *,
        clock: Clock | None = None,
        board: WaitBoard | None = None,
        describe_missing: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self.table = table
        self.leases = leases or LeaseTable()
        self._describe_missing = describe_missing
        self._putters: dict[_Putter, None] = {}
        self._watchers: set[asyncio.Future[None]] = set()
        self._clock = clock or SystemClock()
        self._board = board or WaitBoard(self._clock)

    def waits(self) -> list[Wait]:
        """Who waits for what right now, longest first."""
        return self._board.listing()

    def stats(self) -> TableStats:
        """A snapshot of the table's statistics."""
        return self.table.stats()

    # Producers

    def offer(self, header: RecordHeader, data: bytes) -> PutVerdict:
        """Store a record now, or say why not; FULL also when others stand in line for room. Never waits."""
        ready = self.table.num_ready
        verdict = self.table.put(header, data, may_begin=not self._putters)
        if self.table.num_ready != ready:
            self.changed()
        return verdict

    async def put(
        self, header: RecordHeader, data: bytes, *, who: str = "producer", deadline_s: float | None = None
    ) -> PutVerdict:
        """Store a record, waiting for room where there is none.

        Cancelling gives the place in line up; a record that had just been stored then stays, and is a duplicate when it
        is put again.

        Raises:
            DeadlineError: There was no room within `deadline_s` seconds.
        """
        verdict = self.offer(header, data)
        if verdict.status is not PutStatus.FULL:
            return verdict
        putter = _Putter(header, data, asyncio.get_running_loop().create_future())
        self._putters[putter] = None
        what = f"room for record {header.record_id!r} in table {self.table.name!r}"
        scope = asyncio.timeout(deadline_s)
        try:
            with self._board.waiting(self._wait("rollout", who, what, "the table's consumer", deadline_s)):
                async with scope:
                    return await putter.verdict
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineError(f"{who} waited {deadline_s} s for {what}: {verdict.reason}") from None
        finally:
            if putter in self._putters:
                del self._putters[putter]
                # Whoever stood behind this one may fit where it did not.
                self._room_freed()

    def add_column(self, record_id: str, name: str, data: bytes) -> PutVerdict:
        """Add a sidecar column to a stored record; see `Table.add_column`."""
        ready = self.table.num_ready
        verdict = self.table.add_column(record_id, name, data)
        if self.table.num_ready != ready:
            self.changed()
        return verdict

    def drop_group(self, group_id: str, reason: str = "dropped", attempt: int = 0) -> bool:
        """End a group; see `Table.drop_group`."""
        dropped = self.table.drop_group(group_id, reason, attempt)
        self._room_freed()
        return dropped

    def requeue(self, group_id: str, attempt: int) -> None:
        """Begin a new attempt at a group; see `Table.requeue`."""
        self.table.requeue(group_id, attempt)
        self._room_freed()

    # Consumers

    async def wait_ready(self, n: int, *, who: str = "consumer", deadline_s: float | None = None) -> None:
        """Return when at least `n` groups could be taken. Cancelling leaves nothing behind.

        Raises:
            DeadlineError: There were fewer after `deadline_s` seconds; names the groups that are missing and where
                they are.
        """

        def enough() -> bool | None:
            return True if self.table.num_ready >= n else None

        await self._until(enough, who=who, what=f"{n} ready groups of table {self.table.name!r}", deadline_s=deadline_s)

    async def take(
        self,
        step: int,
        choose: Choose,
        *,
        consumer_id: str = "learner",
        incarnation: int = 0,
        deadline_s: float | None = None,
    ) -> Lease:
        """Lease the batch of a step; the same step of the same incarnation gets the same lease.

        Args:
            step: The step that will train on the batch.
            choose: Gets the ready groups and names those to take, or answers None for "not yet"; asked again after
                each change. Not asked for a step that is replayed.
            consumer_id: Who takes.
            incarnation: Of the consumer; a newer one fences the older.
            deadline_s: Seconds to wait. Cancelling while waiting leases nothing.

        Raises:
            DeadlineError: No batch was chosen in time; names the groups that are missing and where they are.
            FencedError: The incarnation is no longer the current one, or the step is committed or leased elsewhere.
            UsageError: `choose` named a group that is not ready.
        """

        def leased() -> Lease | None:
            self._give_back(self.leases.enter(consumer_id, incarnation))
            lease = self.leases.find(step, consumer_id, incarnation)
            if lease is not None:
                return lease
            items = self.leases.replay(step)
            chosen = list(items) if items is not None else choose(self.table.ready_groups())
            if chosen is None:
                return None
            lease = self.leases.grant(step, consumer_id, incarnation, chosen)
            try:
                self.table.lease(chosen)
            except UsageError:
                self.leases.release(step, lease.token)
                raise
            return lease

        who = f"{consumer_id} (incarnation {incarnation})"
        what = f"the batch of step {step} of table {self.table.name!r}"
        return await self._until(leased, who=who, what=what, deadline_s=deadline_s)

    def commit(self, step: int, token: int) -> Commit:
        """Consume a leased batch; see `LeaseTable.commit`."""
        lease = next((lease for lease in self.leases.live if lease.token == token), None)
        commit = self.leases.commit(step, token)
        if lease is not None and commit.first:
            if commit.freed:
                self.table.free(commit.freed)
            else:
                self.table.hold(lease.items)
            self._room_freed()
            self.changed()
        return commit

    def release(self, step: int, token: int) -> None:
        """Give a leased batch back; see `LeaseTable.release`."""
        self._give_back(self.leases.release(step, token))

    def consumer_lost(self, consumer_id: str, incarnation: int) -> None:
        """An incarnation is proven dead: what it had leased can be taken again, and it is fenced."""
        self._give_back(self.leases.consumer_lost(consumer_id, incarnation))
        self.changed()

    def checkpoint_covers(self, step: int) -> None:
        """A durable checkpoint holds the effect of all steps up to this one: free what was held for them."""
        self.table.free(self.leases.checkpoint_covers(step))
        self._room_freed()

    def rewind(self, step: int) -> None:
        """Go back to a checkpoint and replay the held batches from `step` on; see `LeaseTable.rewind`."""
        self._give_back(self.leases.rewind(step))
        self.changed()

    def changed(self) -> None:
        """Ask every waiting `choose` again. Called by whoever changes what its answer depends on."""
        watchers, self._watchers = self._watchers, set()
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    # Inner workings

    async def _until(self, attempt: Callable[[], T | None], *, who: str, what: str, deadline_s: float | None) -> T:
        """Try after each change until there is a result."""
        result = attempt()
        if result is not None:
            return result
        scope = asyncio.timeout(deadline_s)
        try:
            with self._board.waiting(self._wait("learner", who, what, "the producers", deadline_s)):
                async with scope:
                    while result is None:
                        await self._next_change()
                        result = attempt()
                    return result
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineError(f"{who} waited {deadline_s} s for {what}: {self._shortfall()}") from None

    def _wait(self, role: str, who: str, what: str, on_whom: str, deadline_s: float | None) -> Wait:
        deadline = float("inf") if deadline_s is None else self._clock.monotonic() + deadline_s
        return Wait(role=role, member=who, waits_for=what, on_whom=on_whom, deadline_s=deadline)

    async def _next_change(self) -> None:
        watcher = asyncio.get_running_loop().create_future()
        self._watchers.add(watcher)
        try:
            await watcher
        finally:
            self._watchers.discard(watcher)

    def _shortfall(self) -> str:
        unfinished = [*islice(self.table.unfinished(), _NAMED_GROUPS), *islice(self._describe_missing(), _NAMED_GROUPS)]
        return f"{self.table.num_ready} groups are ready; " + ("; ".join(unfinished) or "no other group is known here")

    def _give_back(self, group_ids: tuple[str, ...]) -> None:
        if group_ids:
            self.table.give_back(group_ids)
            self.changed()

    def _room_freed(self) -> None:
        ready = self.table.num_ready
        self._serve_line()
        if self.table.num_ready != ready:
            self.changed()

    def _serve_line(self) -> None:
        may_begin = True
        for putter in list(self._putters):
            if putter.verdict.done():
                continue
            verdict = self.table.put(putter.header, putter.data, may_begin=may_begin)
            if verdict.status is PutStatus.FULL:
                may_begin = False
            else:
                self._putters.pop(putter, None)
                putter.verdict.set_result(verdict)
