"""Best-fit decreasing: sizes into as few bins of one capacity as a simple rule finds."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each size, longest first, into the fullest bin that still holds it.

    Takes at most 11/9 of the least number of bins plus one (Johnson et al., 1974). No two bins fit together into one. A
    size over the capacity gets a bin of its own.

    Args:
        sizes: Each at least 0; the order breaks ties.
        capacity: Of a bin; below 1 every positive size is alone.

    Returns:
        Positions in `sizes`, by bin; bins in the order in which they were opened.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (what still fits, bin), sorted; full bins are left out
    for position in sorted(range(len(sizes)), key=lambda position: -sizes[position]):
        size = sizes[position]
        place = bisect_left(room, (size, -1))
        if place < len(room):
            left, index = room.pop(place)
            bins[index].append(position)
        else:
            left, index = capacity, len(bins)
            bins.append([position])
        if left > size:
            insort(room, (left - size, index))
    return bins
