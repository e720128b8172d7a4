"""A digest of a whole state that is a sum over its elements.

The digest of a set of elements is the sum, modulo 2**64, of `bits * key(tensor, position)` over them. So

- it composes: over any split of a state into shards, buckets, ranks or tensor-parallel workers the digests add up;
- it follows a change at the cost of the change: `change_digest` needs the changed elements alone;
- it depends on places: a swap of two different elements changes it, and a change of a single element always does,
  because keys are odd and what they multiply is below 2**32.

The state is read as 32-bit words: a float32 is one, two 16-bit floats are one, the element at the even position in the
low half. Word u of tensor t, in row r = u // WORDS and column c = u % WORDS, has the key `column_key[c] * row_key(t,
r)`. So one product with a constant vector serves all rows, and the digest costs little more than a read of the memory.

It finds errors, not forgeries: the keys are public. As a multilinear hash (Carter and Wegman, 1979) it misses a random
error of several elements with a probability of about 2**-63, and of 2**-32 at worst: where all of them lie in the high
halves of their words and differ in the sign bit alone.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from headrace.engine.errors import InputError
from headrace.engine.weights.gaps import Positions
from headrace.engine.weights.ulp import RawArray

DIGEST_MODULUS = 1 << 64

# 32-bit words that share a row's key.
WORDS = 8192

_ROW_BYTES = 4 * WORDS

# Rows of one pass: what is in flight (rows and shifted rows) stays in the second cache level.
_ROWS_A_PASS = 8

# Likewise for changes; a pass has a fixed cost, too, which a bucket of 1% changes pays once.
_CHANGES_A_PASS = 1 << 16

# 2**64 over the golden ratio: the step of the sequence that the keys are mixed from.
_STEP = 0x9E37_79B9_7F4A_7C15

_U64 = npt.NDArray[np.uint64]


def state_digest(name_id: int, offset: int, array: RawArray) -> int:
    """The digest of consecutive elements of one tensor.

    Args:
        name_id: The tensor's index in the layout, 0..2**32-1.
        offset: Position of the first element in the flattened tensor.
        array: The elements' bits, uint16 or uint32, C-contiguous; any shape.

    Raises:
        InputError: The dtype is another, or the offset is negative.
    """
    size = array.dtype.itemsize
    if array.dtype.kind != "u" or size not in (2, 4) or offset < 0:
        raise InputError(
            f"{array.dtype} elements at offset {offset} were given; the digest takes the bits as uint16 or uint32, "
            "from an offset of 0 on"
        )
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    begin, end = offset * size, offset * size + len(data)
    first_full, last_full = -(-begin // _ROW_BYTES), end // _ROW_BYTES
    if first_full > last_full:
        return _part_digest(name_id, begin, data)
    head, tail = first_full * _ROW_BYTES - begin, last_full * _ROW_BYTES - begin
    total = _rows_digest(name_id, first_full, data[head:tail].view("<u8").reshape(-1, WORDS // 2))
    total += _part_digest(name_id, begin, data[:head])
    total += _part_digest(name_id, last_full * _ROW_BYTES, data[tail:])
    return total % DIGEST_MODULUS


def change_digest(name_id: int, offset: int, positions: Positions, old: RawArray, new: RawArray) -> int:
    """The digest of the new elements less that of the old ones, modulo 2**64. Costs time by the number of changes.

    Args:
        name_id: The tensor's index in the layout.
        offset: What is added to each position.
        positions: Strictly increasing, shape [n], counted from `offset`.
        old: Bits before, shape [n].
        new: Bits after, shape [n].
    """
    total = 0
    for begin in range(0, len(positions), _CHANGES_A_PASS):
        some = slice(begin, begin + _CHANGES_A_PASS)
        total += _some_changes(name_id, positions[some] + offset, old[some], new[some])
    return total % DIGEST_MODULUS


@lru_cache(maxsize=2)
def element_keys(element_bytes: int) -> _U64:
    """The key of each element of a row without the row's own: shape [WORDS * 4 / element_bytes]. Read-only."""
    keys = _column_keys()
    if element_bytes == 2:
        keys = np.stack([keys, keys << np.uint64(16)], axis=1).reshape(-1)
    keys.flags.writeable = False
    return keys


def row_keys(name_id: int, first_row: int, num_rows: int) -> _U64:
    """The keys of consecutive rows of a tensor, shape [num_rows]."""
    base = _mixed(np.array([name_id + 1], np.uint64) * np.uint64(_STEP))
    rows = np.arange(first_row + 1, first_row + 1 + num_rows, dtype=np.uint64)
    return _mixed(base + rows * np.uint64(_STEP)) | np.uint64(1)


def _some_changes(name_id: int, at: Positions, old: RawArray, new: RawArray) -> int:
    keys = element_keys(new.dtype.itemsize)
    products = keys[at & (len(keys) - 1)]
    products *= np.subtract(new, old, dtype=np.int64).view(np.uint64)
    # One sum for each row that is touched; the rows between them sum to nothing.
    first, last = int(at[0]) // len(keys), int(at[-1]) // len(keys)
    begins = np.searchsorted(at, np.arange(first, last + 1) * len(keys))
    used = np.flatnonzero(np.diff(begins, append=len(at)))
    sums = np.add.reduceat(products, begins[used])
    return int(np.dot(sums, row_keys(name_id, first, last + 1 - first)[used]))


def _column_keys() -> _U64:
    return _mixed(np.arange(1, WORDS + 1, dtype=np.uint64) * np.uint64(_STEP)) | np.uint64(1)


def _mixed(values: _U64) -> _U64:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), variant 13 of Stafford."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=1)
def _pair_keys() -> tuple[_U64, _U64]:
    """Keys for 64-bit words w = low + 2**32 high, so that low * a + high * b is w * a + high * (b - 2**32 a)."""
    keys = _column_keys()
    low, high = keys[0::2].copy(), keys[1::2]
    return low, high - (low << np.uint64(32))


def _rows_digest(name_id: int, first_row: int, rows: npt.NDArray[np.uint64]) -> int:
    """Of whole rows, given as 64-bit words of shape [num_rows, WORDS / 2]."""
    low, high = _pair_keys()
    sums = np.empty(len(rows), np.uint64)
    shifted = np.empty((min(_ROWS_A_PASS, len(rows)), WORDS // 2), np.uint64)
    for begin in range(0, len(rows), _ROWS_A_PASS):
        some = rows[begin : begin + _ROWS_A_PASS]
        upper = np.right_shift(some, np.uint64(32), out=shifted[: len(some)])
        sums[begin : begin + len(some)] = np.einsum("ij,j->i", some, low) + np.einsum("ij,j->i", upper, high)
    return int(np.dot(sums, row_keys(name_id, first_row, len(rows))))


def _part_digest(name_id: int, begin: int, data: npt.NDArray[np.uint8]) -> int:
    """Of less than a row; `begin` is the first byte's place in the tensor. Missing elements count as zeros."""
    if not len(data):
        return 0
    row, place = divmod(begin, _ROW_BYTES)
    first_word, lead = divmod(place, 8)
    num_words = -(-(lead + len(data)) // 8)
    words = np.zeros(num_words, np.dtype("<u8"))
    words.view(np.uint8)[lead : lead + len(data)] = data
    low, high = (keys[first_word : first_word + num_words] for keys in _pair_keys())
    total = int(np.dot(words, low)) + int(np.dot(words >> np.uint64(32), high))
    return total * int(row_keys(name_id, row, 1)[0]) % DIGEST_MODULUS
