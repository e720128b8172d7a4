"""Steps between floats, counted in neighbouring floats."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import CorruptUpdateError
from headrace.engine.weights.ulp import RawArray, decode_steps, encode_steps, order


def pairs(old: RawArray, new: RawArray) -> tuple[RawArray, RawArray]:
    moved = old != new
    return old[moved], new[moved]


def test_neighbouring_floats_have_neighbouring_orders() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    finite = halves[np.isfinite(halves.view(np.float16))]
    by_value = finite[np.argsort(finite.view(np.float16).astype(np.float64), kind="stable")]
    ranks = np.sort(order(by_value))
    assert np.array_equal(np.diff(ranks.astype(np.int32)), np.ones(len(finite) - 1))
    # Both zeros compare equal as floats, so their order among each other is not checked.
    rising = order(by_value[by_value & 0x7FFF != 0]).astype(np.int32)
    assert np.all(np.diff(rising) > 0)


@pytest.mark.parametrize("old", [0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x3F80])
def test_every_step_from_a_value_to_any_other_comes_back(old: int) -> None:
    before, after = pairs(np.full(1 << 16, old, np.uint16), np.arange(1 << 16, dtype=np.uint16))
    steps, escapes = encode_steps(before, after)
    assert len(escapes) == len(before) - 255
    assert np.array_equal(decode_steps(before, steps, escapes), after)


def test_one_ulp_down_and_up_are_the_bytes_one_and_two() -> None:
    one, above, below = 0x3F80, 0x3F81, 0x3F7F
    old = np.array([one, one, 0x8000 | one, 0x8000 | one], np.uint16)
    new = np.array([below, above, 0x8000 | above, 0x8000 | below], np.uint16)
    steps, escapes = encode_steps(old, new)
    assert steps.tolist() == [1, 2, 1, 2] and not len(escapes)


def test_the_two_zeros_are_one_step_apart() -> None:
    steps, _ = encode_steps(np.array([0x0000, 0x8000], np.uint16), np.array([0x8000, 0x0000], np.uint16))
    assert steps.tolist() == [1, 2]


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 2), min_size=1))
def test_any_pair_of_32_bit_patterns_comes_back(values: list[tuple[int, int]]) -> None:
    before, after = pairs(*np.array(values, np.uint32).T.copy())
    assert np.array_equal(decode_steps(before, *encode_steps(before, after)), after)


@pytest.mark.parametrize("num", [0, 2])
def test_another_number_of_escapes_is_refused(num: int) -> None:
    with pytest.raises(CorruptUpdateError, match="1 steps are escaped, but"):
        decode_steps(np.zeros(2, np.uint16), np.array([0, 3], np.uint8), np.zeros(num, np.uint16))
