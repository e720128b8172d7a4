"""Random worlds against the window: workers that lag, groups that fail, prefetch, external groups, both policies."""

import random
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.scheduling.staleness import Admission, Stage, StalenessWindow
from headrace.engine.types import PolicyVersion


class World:
    """A plain model: for each group in the window its stage and, once it started, its oldest version."""

    def __init__(
        self, groups: int, staleness: int, sync: int, policy: Literal["wait", "drop"], rng: random.Random
    ) -> None:
        self.bound = staleness
        self.sync = sync
        self.rng = rng
        self.window = StalenessWindow(groups, staleness, self.sync, "oldest", policy)
        self.groups = groups
        self.policy = policy
        self.stages: dict[str, Stage] = {}
        self.versions: dict[str, int] = {}
        self.leases: dict[str, int] = {}
        self.workers = [0, 0]
        self.step = 0
        self.names = 0

    def published(self) -> int:
        return self.step // self.sync * self.sync

    def at(self, *stages: Stage) -> list[str]:
        return [name for name, stage in self.stages.items() if stage in stages]

    def forget(self, name: str) -> None:
        del self.stages[name]
        self.versions.pop(name, None)
        self.leases.pop(name, None)

    def admit(self) -> None:
        assert self.window.can_admit() is (len(self.stages) < (self.bound + 1) * self.groups)
        if self.window.can_admit():
            self.names += 1
            name = f"g{self.names}"
            version = self.window.admit(name).version
            assert version % self.sync == 0
            assert version <= self.published() + self.sync  # the last one published, or the next
            self.stages[name] = Stage.QUEUED

    def push(self) -> None:
        age = self.rng.randint(0, 4)
        version = self.step - age
        verdict = self.window.check(version)
        assert (verdict is Admission.STALE) is (age > self.bound)
        if verdict is Admission.OK:
            self.names += 1
            self.window.admit(f"g{self.names}", version)
            self.stages[f"g{self.names}"] = Stage.GENERATED
            self.versions[f"g{self.names}"] = version

    def start(self) -> None:
        worker = self.rng.randint(0, 1)
        able = [name for name in self.at(Stage.QUEUED) if self.window.min_version(name).version <= self.workers[worker]]
        if able:
            name = self.rng.choice(able)
            self.window.started(name, PolicyVersion(0, self.workers[worker]))
            self.stages[name], self.versions[name] = Stage.RUNNING, self.workers[worker]

    def advance(self) -> None:
        able = self.at(Stage.RUNNING, Stage.GENERATED)
        if able:
            name = self.rng.choice(able)
            if self.stages[name] is Stage.RUNNING:
                self.window.generated(name, self.versions[name])
                self.stages[name] = Stage.GENERATED
            else:
                self.window.ready(name)
                self.stages[name] = Stage.READY

    def fail(self) -> None:
        able = self.at(Stage.QUEUED, Stage.RUNNING, Stage.GENERATED, Stage.READY)
        if able:
            name = self.rng.choice(able)
            self.window.requeued(name)
            self.stages[name] = Stage.QUEUED
            self.versions.pop(name, None)

    def drop(self) -> None:
        if self.stages:
            name = self.rng.choice(list(self.stages))
            self.window.dropped(name)
            self.forget(name)

    def update_worker(self) -> None:
        self.workers[self.rng.randint(0, 1)] = self.published()

    def lease(self, ahead: int = 0) -> None:
        step = self.step + ahead
        taken = list(self.leases.values())
        if ahead and taken.count(self.step) < self.groups:
            return
        need = self.groups - taken.count(step)  # not all, after a leased group was dropped
        batch = self.window.select(self.at(Stage.READY), step)[:need]
        if len(batch) < need or self.window.may_begin(step, batch):
            return
        for name in self.window.doomed(step, batch):
            assert self.versions[name] + self.bound <= step
            self.window.dropped(name)
            self.forget(name)
        for name in batch:
            assert step - self.versions[name] <= self.bound
            self.window.leased(name, step)
            self.stages[name], self.leases[name] = Stage.LEASED, step

    def prefetch(self) -> None:
        self.lease(1)

    def train(self) -> None:
        done = [name for name, step in self.leases.items() if step == self.step]
        if len(done) == self.groups and not self.window.may_begin(self.step):
            assert sorted(self.window.trained(self.step)) == sorted(done)
            for name in done:
                self.forget(name)
            self.step += 1

    def release(self) -> None:
        last = max(self.leases.values(), default=None)
        for name in [name for name, step in self.leases.items() if step == last]:
            self.window.released(name)
            self.stages[name] = Stage.READY
            del self.leases[name]

    def the_window_is_bounded_and_agrees_with_the_model(self) -> None:
        assert len(self.window) == len(self.stages) <= (self.bound + 1) * self.groups
        assert self.window.step == self.step
        counts = self.window.counts()
        assert all(counts[stage] == len(self.at(stage)) for stage in Stage)

    def under_wait_all_that_has_started_can_still_be_trained_in_time(self) -> None:
        if self.policy == "drop":
            return
        assert self.window.stale() == []
        waiting = [version + self.bound for name, version in self.versions.items() if name not in self.leases]
        for last in range(self.step, self.step + self.bound + 1):
            places = (last - self.step + 1) * self.groups
            places -= sum(step <= last for step in self.leases.values())
            assert sum(due <= last for due in waiting) <= places

    def go_on(self) -> None:
        """Whatever happened, if engines and prompts go on so does the learner: no deadlock."""
        for _ in range(self.bound + 2):
            before = self.step
            self.release()
            self.release()
            for name in self.window.stale():
                self.window.dropped(name)
                self.forget(name)
            self.workers = [self.published()] * 2
            while self.window.can_admit():
                self.admit()
            for name in self.at(Stage.QUEUED):
                if self.window.min_version(name).version <= self.workers[0]:
                    self.start()
            while self.at(Stage.RUNNING, Stage.GENERATED):
                self.advance()
            self.lease()
            self.train()
            assert self.step == before + 1


EVENTS = {
    World.admit: 8,
    World.push: 1,
    World.start: 8,
    World.advance: 12,
    World.fail: 1,
    World.drop: 1,
    World.update_worker: 3,
    World.lease: 5,
    World.prefetch: 1,
    World.train: 5,
    World.release: 1,
}


@settings(max_examples=100, deadline=None)
@given(
    groups=st.integers(1, 3),
    staleness=st.integers(0, 3),
    sync=st.integers(1, 4),
    policy=st.sampled_from(["wait", "drop"]),
    rng=st.randoms(use_true_random=False),
)
def test_in_any_world_the_bound_holds_nothing_started_is_lost_and_the_learner_goes_on(
    groups: int, staleness: int, sync: int, policy: Literal["wait", "drop"], rng: random.Random
) -> None:
    world = World(groups, staleness, min(sync, staleness + 1), policy, random.Random(rng.random()))
    for event in random.Random(rng.random()).choices(list(EVENTS), list(EVENTS.values()), k=250):
        event(world)
        world.the_window_is_bounded_and_agrees_with_the_model()
        world.under_wait_all_that_has_started_can_still_be_trained_in_time()
    world.go_on()
