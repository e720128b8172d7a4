"""Dispatch with credits: which waiting group goes to which worker next.

Invariants:

1. A group is waiting, or in flight at exactly one worker, or unknown to the queue.
2. A worker never has more groups in flight than credits, nor all workers together more than `limit`, unless credits or
   limit were lowered below what was in flight already.
3. A group goes only to a worker that serves its min_version or newer. Laggards and draining workers get nothing.
4. Of the groups that some free worker may run, the one that entered first goes first; a group that comes back keeps
   its place.

Owns no task: callers ask `next_assignment` until it answers None, after each event.
"""

import heapq
from dataclasses import dataclass, field

from headrace.engine.errors import InputError
from headrace.engine.types import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A group to send to a worker; it is in flight there from now on."""

    worker: str
    group_id: str
    min_version: PolicyVersion
    serving: PolicyVersion


@dataclass(slots=True)
class _Group:
    sequence: int
    min_version: PolicyVersion
    worker: str | None = None


@dataclass(slots=True)
class _Worker:
    sequence: int
    credits: int
    version: PolicyVersion
    draining: bool = False
    groups: dict[str, None] = field(default_factory=dict[str, None])  # in order of dispatch

    def free(self) -> int:
        return 0 if self.draining else self.credits - len(self.groups)


class DispatchQueue:
    """Waiting groups and the workers' credits.

    Args:
        limit: Most groups in flight over all workers; None for no limit but the credits.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._groups: dict[str, _Group] = {}
        self._workers: dict[str, _Worker] = {}
        # For each min_version a heap of (sequence, group); entries of groups that left or changed are skipped when met.
        self._waiting: dict[PolicyVersion, list[tuple[int, str]]] = {}
        self._sequence = 0
        self._num_in_flight = 0
        self.limit = limit

    @property
    def num_waiting(self) -> int:
        """Groups that no worker has."""
        return len(self._groups) - self._num_in_flight

    @property
    def num_in_flight(self) -> int:
        """Groups that a worker has."""
        return self._num_in_flight

    def in_flight(self, worker: str) -> list[str]:
        """The groups that a worker has, in order of dispatch."""
        return list(self._worker(worker).groups)

    # Groups.

    def push(self, group_id: str, min_version: PolicyVersion) -> None:
        """A group waits from now on.

        Raises:
            InputError: It is in the queue or in flight already.
        """
        if group_id in self._groups:
            raise InputError(f"group {group_id!r} is queued already; push it again when it has finished")
        self._sequence += 1
        self._groups[group_id] = _Group(self._sequence, min_version)
        self._wait(group_id)

    def set_min_version(self, group_id: str, min_version: PolicyVersion) -> None:
        """Change what a waiting group needs; of one in flight, what it will need if it comes back."""
        group = self._group(group_id)
        if group.min_version != min_version:
            group.min_version = min_version
            if group.worker is None:
                self._wait(group_id)

    def finished(self, group_id: str) -> None:
        """A group in flight is done; its credit is free."""
        if self._group(group_id).worker is None:
            raise InputError(f"group {group_id!r} is waiting and cannot finish; cancel it instead")
        self.cancel(group_id)

    def returned(self, group_id: str) -> None:
        """A group in flight failed on its worker and waits again, in its old place."""
        group = self._group(group_id)
        if group.worker is None:
            raise InputError(f"group {group_id!r} is waiting already; only a group in flight can come back")
        self._take_back(group_id, group)
        self._wait(group_id)

    def cancel(self, group_id: str) -> str | None:
        """Forget a group; returns the worker that has it and must be told, if any."""
        group = self._group(group_id)
        worker = group.worker
        if worker is not None:
            self._take_back(group_id, group)
        del self._groups[group_id]
        return worker

    # Workers.

    def add_worker(self, worker: str, credits: int, version: PolicyVersion) -> None:
        """A worker joined, with room for `credits` groups.

        Raises:
            InputError: It is here already (report the old one as lost first), or the credits are negative.
        """
        if worker in self._workers or credits < 0:
            raise InputError(f"worker {worker!r} with {credits} credits cannot join: known already or negative credits")
        self._sequence += 1
        self._workers[worker] = _Worker(self._sequence, credits, version)

    def set_credits(self, worker: str, credits: int) -> None:
        """Change how many groups the worker may have at a time; what is in flight stays."""
        if credits < 0:
            raise InputError(f"{credits} credits were given to worker {worker!r}; at least 0 are allowed")
        self._worker(worker).credits = credits

    def set_version(self, worker: str, version: PolicyVersion) -> None:
        """The worker's engine has acknowledged a version."""
        self._worker(worker).version = version

    def drain(self, worker: str) -> None:
        """Give the worker nothing more; what is in flight goes on."""
        self._worker(worker).draining = True

    def worker_lost(self, worker: str) -> list[str]:
        """Forget a worker; its groups wait again in their old places and are named."""
        groups = list(self._worker(worker).groups)
        for group_id in groups:
            self.returned(group_id)
        del self._workers[worker]
        return groups

    def next_assignment(self) -> Assignment | None:
        """Send the first group that can go to the worker with most free credits that may run it; None if none can.

        Among equally free workers the one with the newest version is taken, then the one that joined first.
        """
        if self.limit is not None and self._num_in_flight >= self.limit:
            return None
        free = [(name, worker) for name, worker in self._workers.items() if worker.free() > 0]
        if not free:
            return None
        head = self._first_waiting(max(worker.version for _, worker in free))
        if head is None:
            return None
        group = self._groups[head]
        fit = [(worker.free(), worker.version, -worker.sequence, name) for name, worker in free]
        name = max(entry for entry in fit if entry[1] >= group.min_version)[3]
        worker = self._workers[name]
        heapq.heappop(self._waiting[group.min_version])
        group.worker = name
        worker.groups[head] = None
        self._num_in_flight += 1
        return Assignment(worker=name, group_id=head, min_version=group.min_version, serving=worker.version)

    def _first_waiting(self, served: PolicyVersion) -> str | None:
        """The earliest waiting group that needs `served` or less. Clears heaps of entries that no longer hold."""
        best: tuple[int, str] | None = None
        for version in list(self._waiting):
            heap = self._waiting[version]
            while heap and not self._holds(heap[0], version):
                heapq.heappop(heap)
            if not heap:
                del self._waiting[version]
            elif version <= served and (best is None or heap[0] < best):
                best = heap[0]
        return None if best is None else best[1]

    def _holds(self, entry: tuple[int, str], version: PolicyVersion) -> bool:
        group = self._groups.get(entry[1])
        return (
            group is not None and group.worker is None and group.sequence == entry[0] and group.min_version == version
        )

    def _wait(self, group_id: str) -> None:
        group = self._groups[group_id]
        heapq.heappush(self._waiting.setdefault(group.min_version, []), (group.sequence, group_id))

    def _take_back(self, group_id: str, group: _Group) -> None:
        assert group.worker is not None
        del self._workers[group.worker].groups[group_id]
        group.worker = None
        self._num_in_flight -= 1

    def _group(self, group_id: str) -> _Group:
        group = self._groups.get(group_id)
        if group is None:
            raise InputError(f"group {group_id!r} is not queued; push it first")
        return group

    def _worker(self, worker: str) -> _Worker:
        found = self._workers.get(worker)
        if found is None:
            raise InputError(f"worker {worker!r} is unknown; add it first")
        return found
