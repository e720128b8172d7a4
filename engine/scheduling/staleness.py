"""The staleness window: who may be admitted, from which version, and what each step may and must train on.

Step k turns version k into k + 1. A group is *due* by the last step that may train on it: its version + max_staleness.
A group that has not started is due by min_version + max_staleness, because no engine with older weights may run it.

Invariants, for S = max_staleness, G = groups_per_step, s = the current step, p = the version published last:

1. At most (S + 1) * G groups are in the window. One leaves when it is trained or dropped, and only then.
2. For each step t >= s, no more groups wait that are due by t than steps s..t have free places, so all can be trained
   in time. A new group gets the oldest published min_version that keeps this; s, rounded up to a published version,
   always does. `may_begin` keeps it under the policy "wait". With "drop", or when tokens turn out older than promised,
   `doomed` and `stale` name the groups that are lost.
3. At least G places are for groups that may run under p. Why: a group is told to wait for a version to come only while
   the places up to p + S are spoken for, so at most (s - p) * G groups are, and s - p <= weight_sync_steps - 1 <= S. So
   each step can be filled, whatever is dropped and replaced: no deadlock, at S = 0 neither.
4. No group is leased for a step at which its lag is over S.
5. The min_version of a group that has not started binds nobody: it is worked out anew as the window moves, so that the
   learner neither waits for nor loses a group that no engine has touched.

Owns no clock, task or generator.
"""

from collections.abc import Collection, Iterable

from headrace.engine.scheduling.admission import AdmissionWindow
from headrace.engine.scheduling.lag import LOST, LagRule
from headrace.engine.scheduling.window import Admission, Stage, WindowGroup

__all__ = ["LOST", "Admission", "LagRule", "Stage", "StalenessWindow"]


class StalenessWindow(AdmissionWindow):
    """The window with the bound guarded where batches are taken; arguments as for `AdmissionWindow`."""

    def lag(self, group_id: str, target_step: int) -> float:
        """Target step minus the group's version; infinite for a lost future. Unstarted: the largest possible."""
        group = self._find(group_id)
        return target_step - (group.min_version if group.version is None else group.version)

    def expires_at(self, group_id: str) -> int:
        """The last step that may train on the group; -1 if none may."""
        return self._find(group_id).due

    def select(self, ready: Iterable[str], step: int) -> list[str]:
        """Those of `ready` that `step` may train on, earliest expiry first, then in order of admission.

        The first `groups_per_step` of them are the batch: no other choice leaves fewer groups to expire.
        """
        groups = [group for group in map(self._find, ready) if group.due >= step and group.stage is not Stage.LEASED]
        return [group.group_id for group in sorted(groups, key=WindowGroup.urgency)]

    def stale(self) -> list[str]:
        """Groups that no step to come may train on; drop them, counted as stale in queue."""
        return [
            group.group_id
            for group in self._groups.values()
            if group.due < self._step and group.stage not in (Stage.QUEUED, Stage.LEASED)
        ]

    def may_begin(self, step: int, batch: Collection[str] = ()) -> list[str]:
        """Groups that `step` must not begin without, most urgent first; none means that it may begin.

        Args:
            step: The step to lease or begin.
            batch: The groups chosen for it with `select`, if they are not leased for it yet.

        Returns:
            Groups of which one or more would become untrainable, by their own age or because too few places are left
            before they expire. Wait for one to become ready and choose the batch again: `select` then puts it in. A
            group that is ready already is named only if the batch is not the one that `select` gives now. Always empty
            under the policy "drop".
        """
        if self.policy == "drop":
            return []
        chosen = [group for group in self._groups.values() if group.step == step or group.group_id in batch]
        others = [group for group in self._rest(batch) if group.due >= self._step]
        blocking: dict[str, None] = {}
        load = 0
        for index, group in enumerate(others):
            load += 1
            last_of_due = index + 1 == len(others) or others[index + 1].due > group.due
            if not last_of_due or load <= self._places.free(self._step, group.due, without=step):
                continue
            # Waiting helps only if what is waited for can still get into the batch.
            if len(chosen) < self.groups_per_step or any(member.due > group.due for member in chosen):
                blocking.update(dict.fromkeys(other.group_id for other in others[: index + 1]))
        return list(blocking)

    def doomed(self, step: int, batch: Collection[str] = ()) -> list[str]:
        """Under the policy "drop": started groups that expire when `step` begins with this batch; to abort now."""
        if self.policy == "wait":
            return []
        return [group.group_id for group in self._rest(batch) if group.due <= step and group.step is None]

    def _rest(self, batch: Collection[str]) -> list[WindowGroup]:
        """Started groups that are neither leased nor in the batch, most urgent first."""
        chosen = frozenset(batch)
        idle = (Stage.QUEUED, Stage.LEASED)
        rest = [group for group in self._groups.values() if group.stage not in idle and group.group_id not in chosen]
        return sorted(rest, key=WindowGroup.urgency)
