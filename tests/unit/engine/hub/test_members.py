"""When a member counts as lost."""

import pytest

from headrace.engine.errors import UsageError
from headrace.engine.hub.members import Limits, Member, Members
from headrace.v1 import control_pb2 as pb

LIMITS = Limits(silent_s=10.0, loading_s=100.0, working_s=50.0)


def members() -> Members:
    found = Members(LIMITS)
    found.join(Member(member_id="rollout-0", role="rollout", rank=0, pid=1, host="h", heard_s=0.0, moved_s=0.0))
    return found


def beat(progress: int, phase: "pb.Phase.ValueType" = pb.PHASE_READY, doing: str = "sampling") -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(member_id="rollout-0", phase=phase, progress=progress, wait=pb.Wait(waits_for=doing))


def lost(found: Members, now_s: float) -> list[str]:
    return [str(error) for _, error in found.lost(now_s)]


def test_a_silent_member_is_lost_after_the_limit_and_not_before() -> None:
    found = members()
    found.beat(beat(1), 1.0, 0.0)
    assert lost(found, 11.0) == []
    assert lost(found, 11.5) == ["rollout-0 has not been heard of for 10 s"]


def test_a_loading_member_may_be_silent_for_longer() -> None:
    found = members()
    found.beat(beat(1, pb.PHASE_LOADING), 1.0, 0.0)
    assert lost(found, 100.0) == []
    assert len(lost(found, 102.0)) == 1


def test_a_member_that_has_asked_for_work_has_loaded_whatever_its_last_heartbeat_said() -> None:
    found = members()
    found.beat(beat(1, pb.PHASE_LOADING, "loading the model"), 1.0, 0.0)
    found.asked("rollout-0", 2.0)
    assert not found.get("rollout-0").is_loading
    assert lost(found, 12.0) == []
    assert lost(found, 12.5) == ["rollout-0 has not been heard of for 10 s"]


def test_a_heartbeat_of_the_loading_that_comes_after_the_request_for_work_changes_nothing() -> None:
    found = members()
    found.asked("rollout-0", 2.0)
    found.beat(beat(1, pb.PHASE_LOADING, "loading the model"), 3.0, 0.0)
    assert len(lost(found, 13.5)) == 1


def test_a_request_for_work_counts_as_heard_and_the_first_one_as_progress() -> None:
    found = members()
    found.asked("rollout-0", 40.0)
    assert lost(found, 49.0) == []
    for second in range(41, 91):  # asking again and again is no work
        found.asked("rollout-0", float(second))
    assert lost(found, 90.0) == []
    found.asked("rollout-0", 91.0)
    assert lost(found, 91.0) == ["rollout-0 has made no progress for 51 s while starting"]


def test_a_successor_of_the_same_name_loads_again() -> None:
    found = members()
    found.asked("rollout-0", 1.0)
    found.join(Member(member_id="rollout-0", role="rollout", rank=0, pid=2, host="h", heard_s=5.0, moved_s=5.0))
    assert lost(found, 100.0) == []


def test_a_rank_that_takes_a_batch_has_asked_and_one_that_nobody_knows_is_ignored() -> None:
    found = members()
    found.join(Member(member_id="mine", role="learner", rank=1, pid=2, host="h", heard_s=0.0, moved_s=0.0))
    found.rank_asked("learner", 1, 3.0)
    found.rank_asked("learner", 0, 3.0)
    found.asked("a stranger", 3.0)
    assert [member.member_id for member in found.all() if member.has_asked] == ["mine"]


def test_a_member_that_beats_without_progress_is_lost_with_what_it_was_doing() -> None:
    found = members()
    for second in range(1, 52):
        found.beat(beat(1), float(second), 0.0)
    assert lost(found, 51.0) == []
    found.beat(beat(1), 52.0, 0.0)
    assert lost(found, 52.0) == ["rollout-0 has made no progress for 51 s while sampling"]
    found.beat(beat(2), 52.0, 0.0)
    assert lost(found, 52.0) == []


def test_what_a_member_does_is_dated_from_its_change() -> None:
    found = members()
    assert found.beat(beat(1, doing="sampling"), 1.0, 1000.0)
    assert not found.beat(beat(2, doing="sampling"), 2.0, 1001.0)
    assert found.get("rollout-0").doing_since_s == 1000.0
    assert found.beat(beat(3, doing="waiting"), 3.0, 1002.0)
    assert found.get("rollout-0").doing_since_s == 1002.0


def test_a_stranger_is_told_to_join_first() -> None:
    found = members()
    assert found.leave("rollout-0") is not None
    with pytest.raises(UsageError, match="join first"):
        found.beat(beat(1), 1.0, 0.0)
