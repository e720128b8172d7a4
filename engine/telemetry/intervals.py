"""Arithmetic of time intervals: who worked when, and who worked at the same time as whom.

An interval is (start, end) in seconds on one clock, closed at the start and open at the end. Intervals of one argument
may overlap and come in any order; an interval that ends where or before it starts is empty.
"""

import math
from collections.abc import Iterable

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals in order."""
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def clipped(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """What lies in [start, end)."""
    return [(max(a, start), min(b, end)) for a, b in intervals if b > start and a < end]


def covered_s(intervals: Iterable[Interval]) -> float:
    """Seconds that at least one interval covers."""
    return math.fsum(end - start for start, end in merged(intervals))


def intersection_s(a: Iterable[Interval], b: Iterable[Interval]) -> float:
    """Seconds that both `a` and `b` cover."""
    left, right = merged(a), merged(b)
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def overlap_fraction(a: Iterable[Interval], b: Iterable[Interval]) -> float:
    """The fraction of the time of `a` during which `b` ran as well, 0 to 1; NaN where `a` is empty."""
    left = merged(a)
    total = covered_s(left)
    if total == 0:
        return math.nan
    return min(1.0, intersection_s(left, b) / total)


def busy_ratio(intervals: Iterable[Interval], start: float, end: float) -> float:
    """The fraction of [start, end) that is covered, 0 to 1; NaN for an empty window."""
    if end <= start:
        return math.nan
    return min(1.0, covered_s(clipped(intervals, start, end)) / (end - start))
