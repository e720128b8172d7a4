"""The digest of a state: a sum over elements, each keyed by its place."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import InputError
from headrace.engine.weights.digest import DIGEST_MODULUS, WORDS, change_digest, state_digest
from headrace.engine.weights.ulp import RawArray

MASK = DIGEST_MODULUS - 1
RAW = st.sampled_from([np.uint16, np.uint32])
# Around the borders of rows, in elements of either width.
OFFSETS = st.sampled_from([0, 1, 2, 3, WORDS - 5, WORDS, 2 * WORDS - 7, 2 * WORDS, 10**12 + 1])


def random_bits(raw: type[np.uint16] | type[np.uint32], count: int, seed: int = 0) -> RawArray:
    return np.random.default_rng(seed).integers(0, np.iinfo(raw).max, count, raw, endpoint=True)


def mixed(value: int) -> int:
    value &= MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def plain_digest(name_id: int, offset: int, array: RawArray) -> int:
    """As docs/weight-format.md defines it, element by element."""
    step = 0x9E3779B97F4A7C15
    total = 0
    for position, bits in enumerate(array.tolist(), offset):
        word, shift = (position // 2, 16 * (position % 2)) if array.dtype.itemsize == 2 else (position, 0)
        row, column = divmod(word, 8192)
        column_key = mixed(step * (column + 1)) | 1
        row_key = mixed(mixed(step * (name_id + 1)) + step * (row + 1)) | 1
        total += (bits << shift) * column_key * row_key
    return total & MASK


@settings(deadline=None, max_examples=50)
@given(RAW, OFFSETS, st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_it_is_the_sum_that_the_specification_defines(
    raw: type[np.uint16] | type[np.uint32], offset: int, count: int, name_id: int
) -> None:
    array = random_bits(raw, count)
    assert state_digest(name_id, offset, array) == plain_digest(name_id, offset, array)


@settings(deadline=None, max_examples=50)
@given(RAW, OFFSETS, st.lists(st.integers(0, 70_000), max_size=4))
def test_the_parts_of_any_split_add_up(raw: type[np.uint16] | type[np.uint32], offset: int, cuts: list[int]) -> None:
    array = random_bits(raw, 70_000)
    borders = [0, *sorted(cuts), len(array)]
    parts = [state_digest(3, offset + begin, array[begin:end]) for begin, end in itertools.pairwise(borders)]
    assert sum(parts) & MASK == state_digest(3, offset, array)


@settings(deadline=None, max_examples=50)
@given(RAW, OFFSETS, st.sets(st.integers(0, 49_999)))
def test_a_change_moves_it_by_the_digest_of_the_change(
    raw: type[np.uint16] | type[np.uint32], offset: int, changed: set[int]
) -> None:
    old, other = random_bits(raw, 50_000, 1), random_bits(raw, 50_000, 2)
    positions = np.array(sorted(changed), np.int64)
    new = old.copy()
    new[positions] = other[positions]
    change = change_digest(5, offset, positions, old[positions], new[positions])
    assert (state_digest(5, offset, old) + change) & MASK == state_digest(5, offset, new)
    back = change_digest(5, offset, positions, new[positions], old[positions])
    assert (change + back) & MASK == 0


def test_a_change_of_many_rows_moves_it_by_the_digest_of_the_change() -> None:
    old, other = random_bits(np.uint16, 300_000, 1), random_bits(np.uint16, 300_000, 2)
    positions = np.arange(0, 300_000, 3)
    new = old.copy()
    new[positions] = other[positions]
    change = change_digest(5, 7, positions, old[positions], new[positions])
    assert (state_digest(5, 7, old) + change) & MASK == state_digest(5, 7, new)


@settings(deadline=None, max_examples=50)
@given(RAW, st.integers(0, 199), st.data())
def test_a_single_changed_bit_always_changes_it(
    raw: type[np.uint16] | type[np.uint32], position: int, data: st.DataObject
) -> None:
    array = random_bits(raw, 200)
    changed = array.copy()
    changed[position] ^= raw(1) << raw(data.draw(st.integers(0, 8 * changed.dtype.itemsize - 1)))
    assert state_digest(0, 0, changed) != state_digest(0, 0, array)


@settings(deadline=None, max_examples=50)
@given(RAW, st.integers(0, 49_999), st.integers(0, 49_999))
def test_two_elements_that_change_places_change_it(
    raw: type[np.uint16] | type[np.uint32], one: int, other: int
) -> None:
    array = random_bits(raw, 50_000)
    swapped = array.copy()
    swapped[[one, other]] = array[[other, one]]
    assert (state_digest(0, 0, swapped) == state_digest(0, 0, array)) == (array[one] == array[other])


def test_it_depends_on_the_tensor_and_the_place() -> None:
    array = random_bits(np.uint16, 1000)
    found = {state_digest(name, offset, array) for name in range(4) for offset in (0, 1, 2, 1000, 2 * WORDS)}
    assert len(found) == 20


def test_the_shape_does_not_matter_and_memory_need_not_be_contiguous() -> None:
    array = random_bits(np.uint16, 4096)
    assert state_digest(0, 0, array.reshape(64, 64)) == state_digest(0, 0, array)
    assert state_digest(0, 0, np.repeat(array, 2)[::2]) == state_digest(0, 0, array)
    assert state_digest(0, 0, np.concatenate([array[:1], array])[1:]) == state_digest(0, 0, array)


@pytest.mark.parametrize("array", [np.zeros(3, np.float32), np.zeros(3, np.int16), np.zeros(3, np.uint64)])
def test_what_is_not_the_bits_of_elements_is_refused(array: np.ndarray) -> None:
    with pytest.raises(InputError, match="uint16 or uint32"):
        state_digest(0, 0, array)


def test_a_negative_offset_is_refused() -> None:
    with pytest.raises(InputError, match="offset -1"):
        state_digest(0, -1, np.zeros(3, np.uint16))
