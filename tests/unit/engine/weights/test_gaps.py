"""Positions as gap bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import CorruptUpdateError
from headrace.engine.weights.gaps import decode_gaps, encode_gaps, max_gap_bytes


@settings(deadline=None)
@given(st.sets(st.integers(0, 5000)))
def test_any_positions_come_back_and_take_no_more_bytes_than_allowed(positions: set[int]) -> None:
    given_positions = np.array(sorted(positions), np.int64)
    gaps = encode_gaps(given_positions)
    assert np.array_equal(decode_gaps(gaps, len(positions), 5001), given_positions)
    assert len(positions) <= len(gaps) <= max_gap_bytes(len(positions), 5001)


def test_gaps_around_the_skip_are_these_bytes() -> None:
    # Gaps of 1, 254, 255, 256 and 510.
    positions = np.cumsum([0, 254, 255, 256, 510])
    assert encode_gaps(positions).tolist() == [1, 254, 255, 0, 255, 1, 255, 255, 0]


@pytest.mark.parametrize(
    ("gaps", "num", "what"),
    [
        ([1, 1], 3, "hold 2 positions"),
        ([1, 255], 1, "do not end with a position"),
        ([255], 0, "do not end with a position"),
        ([0, 1], 2, "name a position twice"),
        ([3, 0], 2, "name a position twice"),
        ([11], 1, "reach position 10 of 10"),
        ([255, 255, 9], 1, "reach position 518 of 10"),
    ],
)
def test_bytes_that_no_positions_give_are_refused(gaps: list[int], num: int, what: str) -> None:
    with pytest.raises(CorruptUpdateError, match=what):
        decode_gaps(np.array(gaps, np.uint8), num, 10)
