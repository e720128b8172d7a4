"""The way of every group: window, ledger and queue kept in step under any order of events."""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.engine.config import Config
from headrace.engine.hub.flow import Ended, GroupFlow
from headrace.engine.scheduling.ledger import GroupState
from headrace.engine.testing import FakeClock
from headrace.engine.types import DropReason, PolicyVersion, Prompt, VersionSpan

START = PolicyVersion(0, 0)


def make(
    groups_per_step: int = 2, max_staleness: int = 1, steps: int = 1000, policy: str = "wait", retries: int = 2
) -> GroupFlow:
    config = Config()
    schedule = msgspec.structs.replace(
        config.schedule, groups_per_step=groups_per_step, max_staleness=max_staleness, stale_policy=policy, group_size=2
    )
    rollout = msgspec.structs.replace(config.rollout, request_retries=retries)
    run = msgspec.structs.replace(config.run, steps=steps)
    config = msgspec.structs.replace(config, schedule=schedule, rollout=rollout, run=run)
    return GroupFlow(config, START, FakeClock())


def admit_all(flow: GroupFlow) -> list[str]:
    admitted: list[str] = []
    while flow.may_admit():
        admitted.append(flow.admit(Prompt(prompt_id=f"p{flow.ledger.counts().admitted}")).group_id)
    return admitted


def dispatch_all(flow: GroupFlow) -> list[tuple[str, int]]:
    sent: list[tuple[str, int]] = []
    while (dispatch := flow.next_dispatch()) is not None:
        sent.append((dispatch.group.group_id, dispatch.group.attempt))
    return sent


def finish(flow: GroupFlow, group_id: str, attempt: int = 0, version: int = 0) -> None:
    span = VersionSpan(PolicyVersion(0, version), 3)
    assert flow.generated(group_id, attempt, [(span,), (span,)])
    flow.ready(group_id, attempt)


def test_a_group_goes_from_admission_to_training_once() -> None:
    flow = make()
    flow.enlist("w", 8, START)
    names = admit_all(flow)
    assert len(names) == 4  # (max_staleness + 1) * groups_per_step
    assert dispatch_all(flow) == [(name, 0) for name in names]
    for name in names[:2]:
        finish(flow, name)
    batch = flow.choose(names, 0)
    assert batch == names[:2]
    flow.leased(batch, 0)
    ended = flow.trained(0)
    assert [end.outcome.trained_at_step for end in ended] == [0, 0]
    assert flow.ledger.counts().trained == 2
    assert flow.ledger.state(names[0]) is GroupState.TRAINED


def test_the_batch_of_the_next_step_can_be_chosen_while_the_current_one_trains() -> None:
    flow = make()
    flow.enlist("w", 8, START)
    names = admit_all(flow)
    dispatch_all(flow)
    for name in names:
        finish(flow, name)
    flow.leased(flow.choose(names, 0) or [], 0)
    assert flow.choose(names[2:], 1) == names[2:]
    assert flow.choose(names[2:], 2) is None
    flow.leased(names[2:], 1)
    assert [end.outcome.trained_at_step for end in flow.trained(0)] == [0, 0]
    assert [end.outcome.trained_at_step for end in flow.trained(1)] == [1, 1]


def test_on_policy_no_batch_is_chosen_ahead() -> None:
    flow = make(max_staleness=0)
    flow.enlist("w", 8, START)
    names = admit_all(flow)
    dispatch_all(flow)
    for name in names:
        finish(flow, name)
    assert flow.choose(names, 1) is None
    assert flow.choose(names, 0) == names


def test_a_group_that_the_current_step_can_train_on_is_not_doomed_before_the_batch_is_chosen() -> None:
    flow = make(max_staleness=0, policy="drop")
    flow.enlist("w", 8, START)
    names = admit_all(flow)
    dispatch_all(flow)
    finish(flow, names[0])
    assert flow.expired(0) == []
    finish(flow, names[1])
    assert flow.choose(names, 0) == names
    assert flow.expired(0, names) == []


def test_no_group_is_admitted_for_steps_that_will_never_come() -> None:
    flow = make(steps=1)
    assert len(admit_all(flow)) == 2
    assert not flow.may_admit()


def test_a_lost_workers_groups_are_dispatched_again_exactly_once() -> None:
    """K-053 sample-never-hangs: what a lost worker held begins anew elsewhere; its late results count for nothing."""
    flow = make()
    flow.enlist("lost", 8, START)
    names = admit_all(flow)
    dispatch_all(flow)
    assert flow.worker_lost("lost") == []
    flow.enlist("other", 8, START)
    assert dispatch_all(flow) == [(name, 1) for name in names]
    span = VersionSpan(START, 1)
    assert not flow.generated(names[0], 0, [(span,)])
    assert flow.generated(names[0], 1, [(span,)])
    assert not flow.generated(names[0], 1, [(span,)])


def test_a_group_that_keeps_failing_is_dropped_and_its_place_is_given_to_another() -> None:
    flow = make(retries=1)
    flow.enlist("w", 8, START)
    first = admit_all(flow)[0]
    dispatch_all(flow)
    assert flow.requeue(first, 0, "it failed", DropReason.ROLLOUT_FAILED) == []
    dispatch_all(flow)
    (end,) = flow.requeue(first, 1, "it failed", DropReason.ROLLOUT_FAILED)
    assert end.outcome.dropped is DropReason.ROLLOUT_FAILED
    assert end.worker == "w"
    assert flow.may_admit()


@pytest.mark.parametrize("when", ["queued", "in flight", "ready"])
def test_dropping_names_the_worker_that_must_be_told(when: str) -> None:
    flow = make()
    first = admit_all(flow)[0]
    if when != "queued":
        flow.enlist("w", 8, START)
        dispatch_all(flow)
    if when == "ready":
        finish(flow, first)
    (end,) = flow.drop(first, 0, DropReason.STALE)
    assert end.worker == ("w" if when == "in flight" else None)
    assert flow.drop(first, 0, DropReason.STALE) == []


def test_at_staleness_zero_nothing_of_the_next_step_runs_before_its_version() -> None:
    flow = make(max_staleness=0)
    flow.enlist("w", 8, START)
    names = admit_all(flow)
    dispatch_all(flow)
    for name in names:
        finish(flow, name)
    flow.leased(flow.choose(names, 0) or [], 0)
    assert admit_all(flow) == []
    flow.trained(0)
    later = admit_all(flow)
    assert len(later) == 2
    assert dispatch_all(flow) == []
    flow.enlist("w", 8, PolicyVersion(0, 1))
    assert dispatch_all(flow) == [(name, 0) for name in later]


class AnyOrder(RuleBasedStateMachine):
    """Random events from workers that die, scorers that fail and a learner that releases its leases."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = make(groups_per_step=2, max_staleness=1, retries=1)
        self.running: dict[str, int] = {}
        self.ready: list[str] = []
        self.leased: list[str] = []
        self.ended: dict[str, int] = {}
        self.workers: dict[str, int] = {}
        self.num_admitted = 0

    def note(self, ended: list[Ended]) -> None:
        for end in ended:
            name = end.outcome.group_id
            self.ended[name] = self.ended.get(name, 0) + 1
            self.running.pop(name, None)
            if name in self.ready:
                self.ready.remove(name)

    @rule()
    def admit(self) -> None:
        self.num_admitted += len(admit_all(self.flow))

    @rule(name=st.sampled_from("ab"))
    def join(self, name: str) -> None:
        self.workers[name] = self.flow.window.step
        self.flow.enlist(name, 2, PolicyVersion(0, self.flow.window.step))

    @rule(name=st.sampled_from("ab"))
    def lose(self, name: str) -> None:
        for group in self.flow.in_flight(name):
            self.running.pop(group.group_id)
        self.note(self.flow.worker_lost(name))
        self.workers.pop(name, None)

    @rule()
    def dispatch(self) -> None:
        for name, attempt in dispatch_all(self.flow):
            assert name not in self.running
            self.running[name] = attempt

    def pick(self, data: st.DataObject, names: list[str]) -> str:
        return data.draw(st.sampled_from(sorted(names)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def generate(self, data: st.DataObject) -> None:
        name = self.pick(data, list(self.running))
        version = int(self.flow.window.expires_at(name) - 1)
        finish(self.flow, name, self.running.pop(name), max(0, version))
        self.ready.append(name)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        name = self.pick(data, list(self.running))
        attempt = self.running.pop(name)
        self.note(self.flow.requeue(name, attempt, "failed", DropReason.ROLLOUT_FAILED))

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), drop=st.booleans())
    def unscored(self, data: st.DataObject, drop: bool) -> None:
        name = self.pick(data, self.ready)
        group = self.flow.group(name)
        assert group is not None
        act: Callable[[], list[Ended]] = (
            (lambda: self.flow.drop(name, group.attempt, DropReason.REWARD_FAILED))
            if drop
            else (lambda: self.flow.requeue(name, group.attempt, "no reward", DropReason.REWARD_FAILED))
        )
        self.ready.remove(name)
        self.note(act())

    @precondition(lambda self: not self.leased)
    @rule()
    def take(self) -> None:
        batch = self.flow.choose(self.ready, self.flow.window.step)
        if batch is not None:
            assert len(batch) == 2
            assert all(self.flow.window.lag(name, self.flow.window.step) <= 1 for name in batch)
            self.flow.leased(batch, self.flow.window.step)
            self.leased = batch
            self.ready = [name for name in self.ready if name not in batch]

    @precondition(lambda self: self.leased)
    @rule(commit=st.booleans())
    def end_lease(self, commit: bool) -> None:
        if commit:
            self.note(self.flow.trained(self.flow.window.step))
        else:
            self.flow.released(self.leased)
            self.ready += self.leased
        self.leased = []

    @invariant()
    def each_group_is_in_one_place_and_ends_once(self) -> None:
        counts = self.flow.ledger.counts()
        unfinished = self.flow.ledger.unfinished()
        assert all(times == 1 for times in self.ended.values())
        assert counts.admitted == self.num_admitted == len(unfinished) + len(self.ended)
        assert len(self.flow.window) == len(unfinished)
        assert set(self.ready) | set(self.running) | set(self.leased) <= set(unfinished)
        assert self.flow.queue.num_in_flight == len(self.running)
        assert self.flow.queue.num_waiting == len(unfinished) - len(self.running) - len(self.ready) - len(self.leased)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
