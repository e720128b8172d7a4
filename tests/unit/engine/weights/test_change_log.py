"""The log names everything that differs from a known version, forgets within its limit, and never guesses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import InputError
from headrace.engine.types import PolicyVersion
from headrace.engine.weights.change_log import ChangeLog, Touched
from headrace.engine.weights.layout import BUCKET_ELEMENTS

SIZE = 60
CUT = 25  # a border of two ranks' shards


def version(number: int) -> PolicyVersion:
    return PolicyVersion(0, number)


def touched(tensor_index: int, start: int, positions: list[int] | None, count: int = SIZE) -> Touched:
    at = None if positions is None else np.array(positions, np.int64)
    return Touched(tensor_index=tensor_index, start=start, count=count, positions=at)


def elements(found: list[Touched]) -> set[tuple[int, int]]:
    names: list[tuple[int, int]] = []
    for one in found:
        at = np.arange(one.count) if one.positions is None else one.positions
        names.extend((one.tensor_index, one.start + int(position)) for position in at)
    assert len(names) == len(set(names)), "an element is named twice"
    return set(names)


@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, SIZE - 1)), unique=True, max_size=20), max_size=8
    ),
    dense=st.sets(st.integers(0, 7), max_size=2),
    limit=st.sampled_from([0, 1000, 1 << 20]),
)
@settings(max_examples=50, deadline=None)
def test_what_differs_from_a_known_version_is_named_and_nothing_is_guessed(
    steps: list[list[tuple[int, int]]], dense: set[int], limit: int
) -> None:
    state = np.zeros((2, SIZE), np.int64)
    history = {0: state.copy()}
    log = ChangeLog(limit)
    log.begin(version(0), 0)
    for number, changed in enumerate(steps, start=1):
        parts: list[Touched] = []
        for tensor in (0, 1):
            at = sorted(position for index, position in changed if index == tensor)
            if tensor == 1 and number - 1 in dense:
                state[tensor] += 1
                parts.append(touched(tensor, 0, None))
                continue
            state[tensor][at] += 1
            parts.append(touched(tensor, 0, [p for p in at if p < CUT], CUT))
            parts.append(touched(tensor, CUT, [p - CUT for p in at if p >= CUT], SIZE - CUT))
        log.record(version(number), number, parts)
        history[number] = state.copy()
        for known in range(number + 1):
            if not log.knows(version(known)):
                assert known < number - 1  # the last step is always held
                continue
            differs = {(int(t), int(p)) for t, p in np.argwhere(history[known] != state)}
            assert differs <= elements(list(log.since(version(known))))
            assert log.digest_of(version(known)) == known
        assert log.num_bytes <= max(limit, 1000)


def test_one_step_gives_back_exactly_its_elements() -> None:
    log = ChangeLog(1 << 20)
    log.begin(version(3), 0)
    start = 5 * BUCKET_ELEMENTS
    log.record(version(5), 0, [touched(1, start, [0, 7, BUCKET_ELEMENTS - 1], BUCKET_ELEMENTS), touched(0, 0, [])])
    (found,) = log.since(version(3))
    assert (found.tensor_index, found.start) == (1, start)
    assert found.positions is not None and found.positions.tolist() == [0, 7, BUCKET_ELEMENTS - 1]


def test_a_block_of_which_a_third_changed_is_given_as_a_range() -> None:
    log = ChangeLog(1 << 20)
    log.begin(version(0), 0)
    log.record(version(1), 0, [touched(0, 0, list(range(0, SIZE, 4)))])
    log.record(version(2), 0, [touched(0, 0, list(range(1, SIZE, 4)))])
    (found,) = log.since(version(0))
    assert found.positions is None and found.count == SIZE
    (found,) = log.since(version(1))
    assert found.positions is not None


def test_of_the_newest_version_nothing_has_changed() -> None:
    log = ChangeLog(1 << 20)
    assert log.newest is None and not log.knows(version(0))
    log.begin(version(0), 9)
    assert list(log.since(version(0))) == []
    assert log.digest_of(version(0)) == 9


def test_a_version_of_a_lost_incarnation_is_not_known() -> None:
    log = ChangeLog(1 << 20)
    log.begin(version(0), 0)
    log.record(version(1), 0, [touched(0, 0, [1])])
    log.begin(PolicyVersion(1, 1), 0)
    assert not log.knows(version(1)) and not log.knows(version(0))
    with pytest.raises(InputError, match="send the whole state"):
        list(log.since(version(1)))


@pytest.mark.parametrize("wrong", [version(0), version(1), PolicyVersion(1, 5)])
def test_a_step_that_does_not_follow_is_refused(wrong: PolicyVersion) -> None:
    log = ChangeLog(1 << 20)
    with pytest.raises(InputError, match="does not follow"):
        log.record(version(1), 0, [])
    log.begin(version(1), 0)
    with pytest.raises(InputError, match="does not follow"):
        log.record(wrong, 0, [])
