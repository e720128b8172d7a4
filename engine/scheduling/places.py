"""The places of the steps to come, and the groups that need them.

A step has `groups_per_step` places. A waiting group is due by the last step that may train on it; a leased group has
taken a place of one step. Everything can still be trained in time if, for each step t, no more groups are due by t than
there are free places up to t (earliest due first is then a schedule).
"""

from collections import Counter


class Places:
    """Counts groups by the step they are due by, and leases by step."""

    def __init__(self, groups_per_step: int) -> None:
        self.groups_per_step = groups_per_step
        self._due: Counter[int] = Counter()
        self._leased: Counter[int] = Counter()

    def wait(self, due: int) -> None:
        """One more group waits that is due by this step."""
        self._due[due] += 1

    def leave(self, due: int) -> None:
        """One of the groups due by this step waits no more."""
        _decrement(self._due, due)

    def lease(self, step: int) -> None:
        """A place of this step is taken."""
        self._leased[step] += 1

    def release(self, step: int) -> None:
        """A place of this step is free again."""
        _decrement(self._leased, step)

    def free(self, first: int, last: int, without: int | None = None) -> int:
        """Places not leased of the steps first..last, leaving out the step `without`."""
        total = max(0, last - first + 1) * self.groups_per_step
        for step, taken in self._leased.items():
            if first <= step <= last and step != without:
                total -= min(taken, self.groups_per_step)
        if without is not None and first <= without <= last:
            total -= self.groups_per_step
        return total

    def fits(self, due: int, step: int) -> bool:
        """Whether one more group due by `due` leaves enough free places, from `step` on, for all that wait."""
        load = 1 + sum(count for other, count in self._due.items() if other <= due)
        if load > self.free(step, due):
            return False
        # Between two dues the load stands still and the places grow, so these steps are all that can be short.
        for later in sorted(other for other in self._due if other > due):
            load += self._due[later]
            if load > self.free(step, later):
                return False
        return True


def _decrement(counter: Counter[int], key: int) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        assert counter[key] == 0, f"step {key} has fewer than no group"
        del counter[key]
