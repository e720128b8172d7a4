"""The staleness window by example; `test_staleness_properties.py` runs it against random worlds."""

import math

import pytest

from headrace.engine.errors import BufferFullError, ConfigError, InputError
from headrace.engine.scheduling.staleness import Admission, LagRule, Stage, StalenessWindow
from headrace.engine.types import PolicyVersion, VersionSpan


def v(number: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion(incarnation, number)


def finish(window: StalenessWindow, group_id: str, version: float) -> None:
    window.generated(group_id, version)
    window.ready(group_id)


def train(window: StalenessWindow, *group_ids: str) -> None:
    for group_id in group_ids:
        window.leased(group_id, window.step)
    assert window.trained(window.step) == sorted(group_ids)


def run_to(window: StalenessWindow, step: int) -> None:
    while window.step < step:
        window.trained(window.step)


@pytest.mark.parametrize("bound, accepted", [(0, {5}), (1, {5, 6}), (2, {5, 6, 7})])
def test_lag_table_a_sample_is_accepted_up_to_the_bound_and_not_one_step_later(bound: int, accepted: set[int]) -> None:
    for step in (5, 6, 7):
        window = StalenessWindow(1, bound, start=v(5))
        window.admit("g")
        window.started("g", v(5))
        finish(window, "g", 5)
        run_to(window, step)
        assert window.lag("g", step) == step - 5
        assert (window.select(["g"], step) == ["g"]) is (step in accepted)


def test_lag_table_a_response_over_two_versions_is_as_old_as_its_oldest_token() -> None:
    version = LagRule(max_staleness=0).measured([[VersionSpan(v(5), 10), VersionSpan(v(6), 10)]])
    for bound, chosen in ((0, []), (1, ["g"])):
        window = StalenessWindow(1, bound, start=v(5))
        window.admit("g")
        finish(window, "g", version)
        run_to(window, 6)
        assert window.lag("g", 6) == 1
        assert window.select(["g"], 6) == chosen


def test_lag_table_bound_0_is_synchronous_and_makes_progress_without_aborting_anything() -> None:
    window = StalenessWindow(2, 0)
    for step in range(5):
        names = [f"{step}-a", f"{step}-b"]
        for name in names:
            assert window.admit(name) == v(step)
        assert not window.can_admit()
        for name in names:
            window.started(name, v(step))
        assert window.may_begin(step, names[:0]) == names
        for name in names:
            finish(window, name, step)
        with pytest.raises(InputError, match="cannot be leased for step"):
            window.leased(names[0], step + 1)  # nothing is prefetched
        assert window.select(names, step) == names
        assert window.may_begin(step, names) == []
        train(window, *names)
        assert window.stale() == []
    assert window.step == 5


def test_version_stamp_lag_is_measured_on_the_tokens_and_not_at_delivery() -> None:
    spans = [VersionSpan(v(3), 30), VersionSpan(v(4), 20)]
    lags = {}
    for measure in ("oldest", "mean", "newest"):
        rule = LagRule(max_staleness=2, measure=measure)
        lags[measure] = 5 - rule.measured([spans])
    assert lags == {"oldest": 2, "mean": pytest.approx(1.6), "newest": 1}


def test_version_stamp_a_group_counts_as_its_worst_sample() -> None:
    rule = LagRule(max_staleness=1, measure="newest")
    assert rule.measured([[VersionSpan(v(3), 1), VersionSpan(v(5), 1)], [VersionSpan(v(4), 9)]]) == 4
    assert LagRule(max_staleness=1, measure="mean").measured([[VersionSpan(v(4), 0)], [VersionSpan(v(6), 2)]]) == 4


def test_a_sample_without_a_version_is_refused() -> None:
    rule = LagRule(max_staleness=1)
    with pytest.raises(InputError):
        rule.measured([])
    with pytest.raises(InputError):
        rule.measured([[]])


def test_lag_at_consumption_a_sample_that_waited_too_long_is_never_selected_and_is_reported() -> None:
    window = StalenessWindow(1, 2, start=v(10))
    window.admit("old")
    window.started("old", v(10))
    finish(window, "old", 10)
    run_to(window, 13)
    window.admit("new")
    window.started("new", v(13))
    finish(window, "new", 13)
    assert window.lag("old", 13) == 3
    assert window.select(["old", "new"], 13) == ["new"]  # and no short batch is made up with the old one
    assert window.stale() == ["old"]
    with pytest.raises(InputError, match="cannot be leased"):
        window.leased("old", 13)
    window.dropped("old")
    assert window.stale() == [] and len(window) == 1


def test_lag_at_consumption_a_pushed_group_obeys_the_same_limit_and_the_same_check() -> None:
    window = StalenessWindow(1, 2, start=v(13))
    assert window.check(10) is Admission.STALE
    with pytest.raises(InputError, match="stale"):
        window.admit("late", 10)
    assert window.check(11) is Admission.OK
    window.admit("x", 11)
    assert window.expires_at("x") == 13
    assert window.check(11) is Admission.CROWDED  # step 13 has one place
    assert window.check(12) is Admission.OK
    window.admit("y")
    window.admit("z")
    assert window.check(13) is Admission.FULL
    with pytest.raises(BufferFullError, match="full"):
        window.admit("w", 13)
    window.ready("x")
    run_to(window, 14)
    assert window.select(["x"], 14) == []
    assert window.stale() == ["x"]


def test_a_pushed_group_from_the_future_is_refused() -> None:
    with pytest.raises(InputError, match="learner is only at 0"):
        StalenessWindow(1, 1).check(1)


def test_prefetch_for_the_next_step_counts_as_the_next_step() -> None:
    window = StalenessWindow(1, 1)
    for name in ("a", "b"):
        window.admit(name)
        window.started(name, v(0))
        finish(window, name, 0)
    window.leased("a", 0)
    assert window.lag("b", 1) == 1
    window.leased("b", 1)
    assert not window.can_admit()  # leased groups hold their places
    assert window.trained(0) == ["a"]
    assert window.can_admit()


def test_the_window_admits_one_step_more_than_the_bound_and_spreads_min_versions() -> None:
    window = StalenessWindow(2, 1)
    assert [window.admit(name).version for name in "abcd"] == [0, 0, 0, 0]
    assert not window.can_admit()
    for name in "abcd":
        window.started(name, v(0))
        finish(window, name, 0)
    train(window, "a", "b")
    assert [window.admit(name).version for name in "ef"] == [1, 1]
    train(window, "c", "d")
    assert [window.admit(name).version for name in "gh"] == [2, 2]


def test_a_bound_below_the_publication_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_staleness to at least 3"):
        StalenessWindow(4, 2, 4)
    StalenessWindow(4, 3, 4)


def test_with_rare_publication_groups_ask_only_for_versions_that_exist_or_will() -> None:
    window = StalenessWindow(1, 1, 2, start=v(0))
    assert [window.admit(name).version for name in "ab"] == [0, 0]
    for name in "ab":
        window.started(name, v(0))
        finish(window, name, 0)
    train(window, "a")
    assert window.admit("c") == v(2)  # version 1 is never published; at version 0 it would expire with "b"
    window.dropped("b")
    assert window.restamped() == {"c": v(0)}  # the freed place of step 1
    window.started("c", v(0))


def test_the_replacement_of_a_dropped_group_can_run_at_once() -> None:
    window = StalenessWindow(1, 1, 2)
    for name in "ab":
        window.admit(name)
        window.started(name, v(0))
    finish(window, "a", 0)
    train(window, "a")
    window.admit("c")
    assert window.min_version("c") == v(2)
    window.dropped("b")
    # Step 1 can be filled only by a group that version 0 may generate.
    assert min(window.min_version("c"), window.admit("d")) == v(0)


def test_a_restart_asks_for_no_version_before_its_own_first() -> None:
    window = StalenessWindow(1, 3, 4, start=v(7, 1))
    assert [window.admit(name) for name in "abcd"] == [v(7, 1)] * 4


def test_tokens_of_a_lost_future_are_never_fresh() -> None:
    window = StalenessWindow(1, 3, start=v(7, 1), ancestry={0: 7})
    assert window.rule.number(v(6)) == 6
    assert window.rule.measured([[VersionSpan(v(7, 1), 5), VersionSpan(v(9), 1)]]) == -math.inf
    assert window.check(-math.inf) is Admission.STALE
    window.admit("g")
    window.started("g", v(7, 1))
    finish(window, "g", -math.inf)
    assert window.lag("g", 7) == math.inf
    assert window.expires_at("g") == -1
    assert window.select(["g"], 7) == [] and window.stale() == ["g"]


def test_an_engine_that_lags_may_not_run_the_group() -> None:
    window = StalenessWindow(1, 0, start=v(3))
    window.admit("g")
    with pytest.raises(InputError, match="requeue it"):
        window.started("g", v(2))
    assert window.counts()[Stage.QUEUED] == 1


def test_under_wait_a_step_waits_for_the_running_group_that_it_would_expire() -> None:
    window = StalenessWindow(1, 1)
    for name in ("slow", "fast"):
        window.admit(name)
        window.started(name, v(0))
    finish(window, "fast", 0)
    assert window.may_begin(0, ["fast"]) == []
    train(window, "fast")
    window.admit("next")
    window.started("next", v(1))
    finish(window, "next", 1)
    assert window.may_begin(1, ["next"]) == ["slow"]
    finish(window, "slow", 0)
    assert window.select(["next", "slow"], 1) == ["slow", "next"]
    assert window.may_begin(1, ["slow"]) == []


def test_under_wait_a_step_does_not_leave_more_groups_than_places_before_they_expire() -> None:
    window = StalenessWindow(1, 2)
    for name in ("a", "b"):
        window.admit(name)
        window.started(name, v(0))
    window.trained(0)  # a step without a batch: a and b expire at step 2, two places are left
    window.admit("c")
    window.started("c", v(1))
    finish(window, "c", 1)
    assert window.may_begin(1, ["c"]) == ["a", "b"]  # either will do
    finish(window, "b", 0)
    assert window.select(["c", "b"], 1)[0] == "b"
    assert window.may_begin(1, ["b"]) == []


def test_under_wait_nothing_waits_for_a_group_that_no_engine_has_touched() -> None:
    window = StalenessWindow(1, 1)
    window.admit("queued")
    window.admit("fast")
    for step, name in enumerate(["fast", "b", "c"]):
        if step:
            window.admit(name)
        window.started(name, v(step))
        finish(window, name, step)
        assert window.may_begin(step, [name]) == []
        train(window, name)
    assert window.restamped() == {"queued": v(2)}
    assert window.stale() == []


def test_under_drop_the_same_group_is_doomed_instead() -> None:
    window = StalenessWindow(1, 1, policy="drop")
    for name in ("slow", "fast"):
        window.admit(name)
        window.started(name, v(0))
    finish(window, "fast", 0)
    assert window.doomed(0, ["fast"]) == []
    train(window, "fast")
    window.admit("next")
    window.started("next", v(1))
    finish(window, "next", 1)
    assert window.may_begin(1, ["next"]) == []
    assert window.doomed(1, ["next"]) == ["slow"]


def test_by_the_newest_token_a_running_group_stays_young() -> None:
    window = StalenessWindow(1, 0, measure="newest")
    window.admit("g")
    window.started("g", v(0))
    window.trained(0)
    assert window.expires_at("g") == 0
    window.progressed("g", 1)
    assert window.expires_at("g") == 1


def test_a_requeued_group_starts_from_nothing_and_keeps_its_place_in_the_order() -> None:
    window = StalenessWindow(1, 1)
    window.admit("a")
    window.admit("b")
    window.started("a", v(0))
    window.trained(0)
    assert window.requeued("a") == v(0)  # step 1 has a place for what version 0 generates
    window.started("a", v(1))
    window.started("b", v(1))
    finish(window, "a", 1)
    finish(window, "b", 1)
    assert window.select(["b", "a"], 1) == ["a", "b"]


def test_a_released_lease_makes_the_group_ready_and_as_old_as_it_is() -> None:
    window = StalenessWindow(1, 0)
    window.admit("g")
    window.started("g", v(0))
    finish(window, "g", 0)
    window.leased("g", 0)
    assert window.select(["g"], 0) == []
    window.released("g")
    assert window.select(["g"], 0) == ["g"]
    assert window.trained(0) == []
    assert window.stale() == ["g"]


def test_a_lease_that_takes_the_place_of_a_group_not_yet_started_moves_that_group_on() -> None:
    window = StalenessWindow(1, 1)
    window.admit("queued")
    window.admit("ready")
    window.trained(0)
    assert window.min_version("queued") == v(0)  # it would be due by step 1
    window.started("ready", v(1))
    finish(window, "ready", 1)
    window.leased("ready", 1)
    with pytest.raises(InputError, match="needs 1"):
        window.started("queued", v(0))
    assert window.restamped() == {"queued": v(1)}


def test_events_out_of_order_or_for_strangers_are_refused() -> None:
    window = StalenessWindow(1, 1)
    window.admit("g")
    for wrong in (lambda: window.ready("g"), lambda: window.leased("g", 0), lambda: window.started("x", v(0))):
        with pytest.raises(InputError):
            wrong()
    with pytest.raises(InputError, match="admit each group once"):
        window.admit("g")
    with pytest.raises(InputError, match="current step is 0"):
        window.trained(1)
    with pytest.raises(ConfigError):
        StalenessWindow(0, 1)


def test_a_window_of_thousands_is_filled_and_moved_quickly() -> None:
    window = StalenessWindow(512, 8)
    names = [f"g{number}" for number in range(window.capacity)]
    for name in names:
        window.admit(name)
    for name in names[:512]:
        window.started(name, v(0))
        finish(window, name, 0)
    assert window.may_begin(0, names[:512]) == []
    for name in names[:512]:
        window.leased(name, 0)
    assert len(window.trained(0)) == 512
    assert len(window) == 8 * 512
