"""What changed in a bucket, as byte planes before compression: the same bytes whichever device found them.

`actors/learner/weight_delta.py` makes the same planes from tensors.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from headrace.engine.errors import InputError
from headrace.engine.weights.digest import change_digest
from headrace.engine.weights.gaps import Positions, encode_gaps
from headrace.engine.weights.layout import BUCKET_ELEMENTS
from headrace.engine.weights.ulp import Bytes, RawArray, encode_steps

_Words = npt.NDArray[np.uint64]

# 64-bit words that are compared at once.
_WORDS_A_PASS = 1 << 17

# Where more than one word in this many differs, single elements are compared at once.
_PLAIN_ABOVE_ONE_IN = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketPlanes:
    """The difference of two states of a bucket; n is the number of changed elements.

    Attributes:
        count: Elements of the bucket.
        gaps: Where they are (`gaps.py`), shape [n + skips].
        steps: How far each moved (`ulp.py`), shape [n].
        escapes: New bits of those that moved further than a step byte holds, in order, shape [num_escapes].
        values: New bits of each, shape [n], uint16 or uint32.
        change_checksum: `change_checksum` of the bits before and after.
        digest_change: What to add to the bucket's digest, modulo 2**64.
    """

    count: int
    gaps: Bytes
    steps: Bytes
    escapes: RawArray
    values: RawArray
    change_checksum: int
    digest_change: int


def diff_bucket(base: RawArray, new: RawArray, *, name_id: int = 0, start: int = 0) -> BucketPlanes:
    """Compare two states of one bucket, bit by bit.

    Args:
        base: Bits of the base state, uint16 or uint32, shape [count].
        new: Bits of the new state, of the same dtype and shape.
        name_id: The tensor's index in the layout; for the digest.
        start: The bucket's first element in the flattened tensor; for the digest.

    Raises:
        InputError: Dtypes or shapes differ or are not allowed, or the bucket is too large.
    """
    check_bucket(base, "base")
    if new.dtype != base.dtype or new.shape != base.shape:
        raise InputError(
            f"base is {base.dtype} {base.shape}, new is {new.dtype} {new.shape}; both must have one dtype and shape"
        )
    positions, old, changed = changed_elements(base, new)
    return planes_of_changes(len(base), positions, old, changed, name_id=name_id, start=start)


def planes_of_changes(
    count: int, positions: Positions, old: RawArray, new: RawArray, *, name_id: int = 0, start: int = 0
) -> BucketPlanes:
    """The planes of changes that are known; none of them may leave an element as it was."""
    steps, escapes = encode_steps(old, new)
    return BucketPlanes(
        count=count,
        gaps=encode_gaps(positions),
        steps=steps,
        escapes=escapes,
        values=new,
        change_checksum=change_checksum(old, new),
        digest_change=change_digest(name_id, start, positions, old, new),
    )


def changed_elements(base: RawArray, new: RawArray) -> tuple[Positions, RawArray, RawArray]:
    """Where the bits differ, in order, and the bits before and after there, each of shape [n].

    Costs little more than a read of both states where few elements changed.
    """
    # A word of 64 bits holds 1 << shift elements. Words are compared first: a quarter of the flags to search.
    shift = 2 if base.dtype.itemsize == 2 else 1
    whole = len(base) >> shift << shift
    found = _changed_words(base[:whole].view(np.uint64), new[:whole].view(np.uint64))
    if found is None:
        positions = np.flatnonzero(base != new)
        return positions, base[positions], new[positions]
    words, old_lanes, new_lanes = found[0], found[1].view(base.dtype), found[2].view(base.dtype)
    moved = np.flatnonzero(old_lanes != new_lanes)
    positions = words[moved >> shift]
    positions <<= shift
    positions += moved & ((1 << shift) - 1)
    rest = np.flatnonzero(base[whole:] != new[whole:]) + whole
    return (
        np.concatenate([positions, rest]),
        np.concatenate([old_lanes[moved], base[rest]]),
        np.concatenate([new_lanes[moved], new[rest]]),
    )


def _changed_words(base: _Words, new: _Words) -> tuple[Positions, _Words, _Words] | None:
    """Which words differ, and the words before and after; None where they are too many for this way to pay."""
    found: list[tuple[Positions, _Words, _Words]] = [(np.empty(0, np.int64), base[:0], new[:0])]
    flags = np.empty(min(len(base), _WORDS_A_PASS), np.bool_)
    for begin in range(0, len(base), _WORDS_A_PASS):
        before, after = base[begin : begin + _WORDS_A_PASS], new[begin : begin + _WORDS_A_PASS]
        differs = np.not_equal(before, after, out=flags[: len(before)])
        if np.count_nonzero(differs) * _PLAIN_ABOVE_ONE_IN > len(differs):
            return None
        words = _few_set(differs)
        # What was compared just now is still in the cache.
        found.append((words + begin, before[words], after[words]))
    words, before, after = (np.concatenate(column) for column in zip(*found, strict=True))
    return words, before, after


def _few_set(flags: npt.NDArray[np.bool_]) -> Positions:
    """`flatnonzero` of flags of which few are set: eight at a time first."""
    whole = len(flags) >> 3 << 3
    eights = flags[:whole].view(np.uint64)
    some = np.flatnonzero(eights != 0)
    hits = np.flatnonzero(eights[some].view(np.bool_))
    found = some[hits >> 3]
    found <<= 3
    found += hits & 7
    rest = np.flatnonzero(flags[whole:])
    return np.concatenate([found, rest + whole]) if len(rest) else found


def change_checksum(old: RawArray, new: RawArray) -> int:
    """xxh3-64 of the new bits, seeded with the xxh3-64 of the old ones: proves the base and the result."""
    return xxhash.xxh3_64_intdigest(little_endian(new).data, xxhash.xxh3_64_intdigest(little_endian(old).data))


def little_endian(bits: RawArray) -> RawArray:
    """C-contiguous and little-endian, whatever the machine; costs nothing on most."""
    return np.ascontiguousarray(bits, bits.dtype.newbyteorder("<"))


def check_bucket(array: RawArray, name: str) -> None:
    """Refuse what is not the bits of a bucket.

    Raises:
        InputError: The dtype is not uint16 or uint32, there is more than one dimension, or the bucket is too large.
    """
    if (
        array.dtype.kind != "u"
        or array.dtype.itemsize not in (2, 4)
        or array.ndim != 1
        or not 0 < len(array) <= BUCKET_ELEMENTS
    ):
        raise InputError(
            f"{name} is {array.dtype} {array.shape}; a bucket is flat, has 1 to {BUCKET_ELEMENTS} elements and is "
            "given as bits, uint16 or uint32"
        )
