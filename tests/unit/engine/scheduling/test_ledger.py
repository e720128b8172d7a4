import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import InputError
from headrace.engine.scheduling.ledger import HISTORY_EVENTS, GroupEvent, GroupLedger, GroupState
from headrace.engine.types import DropReason


def to_leased(ledger: GroupLedger, group_id: str, attempt: int = 0, step: int = 0) -> None:
    assert ledger.dispatched(group_id, attempt, "w", 1.0)
    assert ledger.generated(group_id, attempt, 2.0)
    assert ledger.scored(group_id, attempt, 3.0)
    assert ledger.ready(group_id, attempt, 4.0)
    assert ledger.leased(group_id, attempt, step, 5.0)


def test_a_group_goes_its_way_and_ends_as_trained() -> None:
    ledger = GroupLedger()
    ledger.admit("g", 0.0)
    to_leased(ledger, "g", step=7)
    assert [event.state.name for event in ledger.history("g")] == [
        "ADMITTED",
        "DISPATCHED",
        "GENERATED",
        "SCORED",
        "READY",
        "LEASED",
    ]
    assert ledger.trained("g", 0, 7, 6.0)
    assert ledger.state("g") is GroupState.TRAINED
    assert ledger.history("g") == (GroupEvent(GroupState.TRAINED, 0, 6.0, "7"),)
    assert ledger.counts().trained == 1 and ledger.counts().unfinished == {}


def test_the_late_result_of_a_lost_worker_changes_nothing_and_is_counted() -> None:
    ledger = GroupLedger()
    ledger.admit("g", 0.0)
    ledger.dispatched("g", 0, "lost", 1.0)
    assert ledger.unfinished("lost") == ["g"]
    assert ledger.requeued("g", 0, 2.0, "worker lost", DropReason.ROLLOUT_FAILED) == 1
    assert ledger.unfinished("lost") == [] and ledger.unfinished() == ["g"]
    assert not ledger.generated("g", 0, 3.0)
    assert ledger.requeued("g", 0, 3.0, "again", DropReason.ROLLOUT_FAILED) == 1
    assert ledger.state("g") is GroupState.ADMITTED and ledger.attempt("g") == 1
    to_leased(ledger, "g", attempt=1)
    assert ledger.counts().late == 2 and ledger.counts().requeued == 1


def test_a_group_that_has_had_all_its_attempts_is_dropped() -> None:
    ledger = GroupLedger(retries=1)
    ledger.admit("g", 0.0)
    assert ledger.requeued("g", 0, 1.0, "timeout", DropReason.REWARD_FAILED) == 1
    assert ledger.requeued("g", 1, 2.0, "timeout", DropReason.REWARD_FAILED) is None
    assert ledger.state("g") is GroupState.DROPPED
    assert ledger.counts().dropped == {DropReason.REWARD_FAILED: 1}
    assert ledger.requeued("g", 1, 3.0, "timeout", DropReason.REWARD_FAILED) is None


def test_a_group_ends_only_once() -> None:
    ledger = GroupLedger()
    ledger.admit("g", 0.0)
    to_leased(ledger, "g")
    assert ledger.trained("g", 0, 0, 6.0)
    assert not ledger.dropped("g", 0, DropReason.STALE, 7.0)
    assert not ledger.trained("g", 0, 0, 7.0)
    with pytest.raises(InputError, match="admitted before"):
        ledger.admit("g", 8.0)
    counts = ledger.counts()
    assert (counts.trained, counts.dropped, counts.late) == (1, {}, 2)


def test_a_repeated_event_is_counted_and_a_skipped_one_is_refused() -> None:
    ledger = GroupLedger()
    ledger.admit("g", 0.0)
    assert ledger.generated("g", 0, 1.0)  # a client pushed it: never dispatched
    assert not ledger.generated("g", 0, 2.0)
    assert ledger.counts().repeated == 1
    with pytest.raises(InputError, match="cannot be leased"):
        ledger.leased("g", 0, 1, 3.0)
    with pytest.raises(InputError, match="reported as trained at step 1, but it is generated"):
        ledger.trained("g", 0, 1, 3.0)
    with pytest.raises(InputError, match="no attempt 4"):
        ledger.scored("g", 4, 3.0)
    with pytest.raises(InputError, match="unknown"):
        ledger.scored("stranger", 0, 3.0)


def test_a_released_group_is_ready_again_and_is_trained_in_the_step_that_leased_it_last() -> None:
    ledger = GroupLedger()
    ledger.admit("g", 0.0)
    to_leased(ledger, "g", step=3)
    assert ledger.released("g", 0, 6.0)
    assert not ledger.released("g", 0, 6.0)
    assert ledger.state("g") is GroupState.READY
    assert ledger.leased("g", 0, 4, 7.0)
    with pytest.raises(InputError, match="leased for step 4"):
        ledger.trained("g", 0, 3, 8.0)
    assert ledger.trained("g", 0, 4, 8.0)


def test_memory_is_bounded_and_the_counts_stay_exact() -> None:
    ledger = GroupLedger(keep_finished=5)
    for number in range(100):
        ledger.admit(f"g{number}", 0.0)
        ledger.dropped(f"g{number}", 0, DropReason.ZERO_VARIANCE, 1.0)
    assert ledger.counts().dropped == {DropReason.ZERO_VARIANCE: 100}
    assert ledger.state("g99") is GroupState.DROPPED
    with pytest.raises(InputError, match="finished long ago"):
        ledger.state("g94")
    ledger.admit("h", 0.0)
    ledger.generated("h", 0, 0.0)
    ledger.ready("h", 0, 0.0)
    for step in range(100):
        ledger.leased("h", 0, step, 0.0)
        ledger.released("h", 0, 0.0)
    assert len(ledger.history("h")) == HISTORY_EVENTS


EVENTS = ("admit", "dispatched", "generated", "scored", "ready", "leased", "released", "trained", "requeued", "dropped")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 3), st.integers(0, 2)), max_size=80))
def test_whatever_happens_each_group_is_unfinished_or_has_ended_once(events: list[tuple[str, int, int]]) -> None:
    ledger = GroupLedger(retries=2, keep_finished=1000)
    ended: dict[str, GroupState] = {}
    for name, number, attempt in events:
        group_id = f"g{number}"
        arguments: dict[str, tuple[object, ...]] = {
            "admit": (0.0,),
            "dispatched": (attempt, "w", 0.0),
            "leased": (attempt, 1, 0.0),
            "trained": (attempt, 1, 0.0),
            "requeued": (attempt, 0.0, "why", DropReason.STALE),
            "dropped": (attempt, DropReason.STOPPED, 0.0),
        }
        try:
            getattr(ledger, name)(group_id, *arguments.get(name, (attempt, 0.0)))
        except InputError:
            continue
        state = ledger.state(group_id)
        assert ended.get(group_id, state) is state  # an end is for ever
        if state >= GroupState.TRAINED:
            ended[group_id] = state
    counts = ledger.counts()
    assert counts.admitted == sum(counts.unfinished.values()) + counts.trained + sum(counts.dropped.values())
    assert counts.trained == sum(state is GroupState.TRAINED for state in ended.values())
    assert sorted(ledger.unfinished()) == sorted(
        f"g{n}" for n in range(4) if f"g{n}" not in ended and _known(ledger, n)
    )


def _known(ledger: GroupLedger, number: int) -> bool:
    try:
        ledger.state(f"g{number}")
    except InputError:
        return False
    return True
