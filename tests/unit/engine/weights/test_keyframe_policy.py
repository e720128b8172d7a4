"""When the whole state is due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.errors import InputError
from headrace.engine.types import PolicyVersion
from headrace.engine.weights.keyframe_policy import KeyframePolicy


def at(version: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion(incarnation, version)


def test_the_first_update_is_full_and_the_next_one_is_not() -> None:
    policy = KeyframePolicy(25)
    assert policy.needs_keyframe(at(1), None)
    policy.accepted(at(1), full=True, num_bytes=100)
    assert not policy.needs_keyframe(at(2), at(1))
    assert policy.base == at(1)


def test_after_a_refusal_the_next_update_is_full() -> None:
    policy = KeyframePolicy(25)
    policy.accepted(at(1), full=True, num_bytes=100)
    policy.refused()
    assert policy.needs_keyframe(at(2), at(1))


def test_a_delta_starts_from_what_the_caller_saw_accepted_and_leads_forward_in_one_incarnation() -> None:
    policy = KeyframePolicy(25)
    policy.accepted(at(4), full=True, num_bytes=100)
    assert policy.needs_keyframe(at(5), None)
    assert policy.needs_keyframe(at(5), at(3))
    assert policy.needs_keyframe(at(4), at(4))
    assert policy.needs_keyframe(at(5, incarnation=1), at(4))


def test_every_so_many_updates_one_is_full() -> None:
    policy = KeyframePolicy(3)
    kinds = []
    for version in range(1, 8):
        full = policy.needs_keyframe(at(version), policy.base)
        policy.accepted(at(version), full=full, num_bytes=100 if full else 1)
        kinds.append(full)
    assert kinds == [True, False, False, True, False, False, True]


def test_with_one_step_every_update_is_full() -> None:
    policy = KeyframePolicy(1)
    policy.accepted(at(1), full=True, num_bytes=100)
    assert policy.needs_keyframe(at(2), at(1))


def test_deltas_that_outweigh_the_keyframe_end_the_chain() -> None:
    policy = KeyframePolicy(25)
    policy.accepted(at(1), full=True, num_bytes=100)
    policy.accepted(at(2), full=False, num_bytes=50)
    policy.accepted(at(3), full=False, num_bytes=50)
    assert not policy.needs_keyframe(at(4), at(3))
    policy.accepted(at(4), full=False, num_bytes=1)
    assert policy.needs_keyframe(at(5), at(4))


def test_after_a_delta_that_saves_little_the_next_updates_are_full_and_then_one_is_tried_again() -> None:
    policy = KeyframePolicy(4)
    kinds: list[bool] = []
    for version in range(1, 12):
        full = policy.needs_keyframe(at(version), policy.base)
        policy.accepted(at(version), full=full, num_bytes=100 if full else 51)
        kinds.append(full)
        assert policy.may_send_delta is (not policy.needs_keyframe(at(version + 1), at(version)))
    assert kinds == [True, False, True, True, True, False, True, True, True, False, True]


def test_no_update_between_keyframes_is_refused() -> None:
    with pytest.raises(InputError, match="at least 1"):
        KeyframePolicy(0)


@given(
    steps=st.integers(1, 6),
    outcomes=st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.booleans()), max_size=40),
)
def test_a_receiver_never_takes_a_chain_that_is_longer_or_heavier_than_allowed(
    steps: int, outcomes: list[tuple[bool, int, bool]]
) -> None:
    policy, since = KeyframePolicy(steps), None
    chain: list[int] = []
    built_on: PolicyVersion | None = None
    for version, (taken, num_bytes, forgotten) in enumerate(outcomes, 1):
        full = policy.needs_keyframe(at(version), None if forgotten else since)
        if not full:
            assert policy.base == built_on is not None
            assert len(chain) + 1 < steps and sum(chain) <= 50
        if not taken:
            policy.refused()
            since = built_on = None
            continue
        policy.accepted(at(version), full=full, num_bytes=50 if full else num_bytes)
        chain = [] if full else [*chain, num_bytes]
        since = built_on = at(version)
