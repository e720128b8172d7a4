"""Sorted positions as bytes: the gap from each to the one before it.

The position before the first is -1, so every gap is at least 1. A byte 0..254 ends a gap; 255 adds 255 to it and goes
on. Decoding is one cumulative sum over the bytes, taken where a byte is not 255; it can run on any device.
"""

import numpy as np
import numpy.typing as npt

from headrace.engine.errors import CorruptUpdateError

Positions = npt.NDArray[np.int64]

# The byte that says "add 255, no element yet".
SKIP = 255


def max_gap_bytes(num_positions: int, count: int) -> int:
    """Bytes that the gaps of `num_positions` positions below `count` take at most."""
    return num_positions + count // SKIP


def encode_gaps(positions: Positions) -> npt.NDArray[np.uint8]:
    """Gap bytes, at least one a position.

    Args:
        positions: Strictly increasing, not negative, shape [n].
    """
    gaps = np.empty(len(positions), np.int64)
    if not len(positions):
        return gaps.astype(np.uint8)
    gaps[0] = positions[0] + 1
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    long = np.flatnonzero(gaps >= SKIP)
    if not len(long):
        return gaps.astype(np.uint8)
    skips = gaps[long] // SKIP
    gaps[long] -= SKIP * skips
    ends = np.cumsum(skips)
    # Where the skips of each long gap begin among all bytes, then each of them.
    begins = long + ends - skips
    within = np.arange(int(ends[-1])) - np.repeat(ends - skips, skips)
    is_end = np.ones(len(gaps) + int(ends[-1]), np.bool_)
    is_end[np.repeat(begins, skips) + within] = False
    encoded = np.full(len(is_end), SKIP, np.uint8)
    encoded[is_end] = gaps
    return encoded


def decode_gaps(gaps: npt.NDArray[np.uint8], num_positions: int, count: int) -> Positions:
    """The positions, shape [num_positions], strictly increasing and below `count`.

    Args:
        gaps: Gap bytes; the caller has bounded their number.
        num_positions: How many there must be.
        count: What every position must be below.

    Raises:
        CorruptUpdateError: The bytes hold another number of positions, or these repeat or reach too far.
    """
    is_end = gaps != SKIP
    found = int(np.count_nonzero(is_end))
    if found != num_positions:
        raise CorruptUpdateError(f"the gaps hold {found} positions, but {num_positions} are announced")
    if not found:
        if len(gaps):
            raise CorruptUpdateError("the gaps do not end with a position")
        return np.empty(0, np.int64)
    if gaps[-1] == SKIP:
        raise CorruptUpdateError("the gaps do not end with a position")
    still = np.flatnonzero(gaps == 0)
    if len(still) and (still[0] == 0 or np.any(gaps[still - 1] != SKIP)):
        raise CorruptUpdateError("the gaps name a position twice")
    reached = np.cumsum(gaps, dtype=np.int64)
    positions = reached if found == len(gaps) else reached[is_end]
    positions -= 1
    if positions[-1] >= count:
        raise CorruptUpdateError(f"the gaps reach position {positions[-1]} of {count} elements")
    return positions
