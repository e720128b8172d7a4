"""Random worlds against the window: workers that lag, groups that fail, prefetch, external groups, both policies."""

from typing import Literal

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.engine.scheduling.staleness import Admission, Stage, StalenessWindow
from headrace.engine.types import PolicyVersion

picks = st.integers(0, 1000)


class World(RuleBasedStateMachine):
    """A plain model: for each group in the window its stage and, once it started, its oldest version."""

    window: StalenessWindow

    @initialize(
        groups=st.integers(1, 3),
        staleness=st.integers(0, 3),
        data=st.data(),
        policy=st.sampled_from(["wait", "drop"]),
    )
    def begin(self, groups: int, staleness: int, data: st.DataObject, policy: Literal["wait", "drop"]) -> None:
        self.bound = staleness
        self.sync = data.draw(st.integers(1, staleness + 1))
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

    @rule()
    def admit(self) -> None:
        assert self.window.can_admit() is (len(self.stages) < (self.bound + 1) * self.groups)
        if self.window.can_admit():
            self.names += 1
            name = f"g{self.names}"
            version = self.window.admit(name).version
            assert version % self.sync == 0
            assert version <= self.published() + self.sync  # the last one published, or the next
            self.stages[name] = Stage.QUEUED

    @rule(age=st.integers(0, 4))
    def push(self, age: int) -> None:
        version = self.step - age
        verdict = self.window.check(version)
        assert (verdict is Admission.STALE) is (age > self.bound)
        if verdict is Admission.OK:
            self.names += 1
            self.window.admit(f"g{self.names}", version)
            self.stages[f"g{self.names}"] = Stage.GENERATED
            self.versions[f"g{self.names}"] = version

    @rule(pick=picks, worker=st.integers(0, 1))
    def start(self, pick: int, worker: int) -> None:
        able = [name for name in self.at(Stage.QUEUED) if self.window.min_version(name).version <= self.workers[worker]]
        if able:
            name = able[pick % len(able)]
            self.window.started(name, PolicyVersion(0, self.workers[worker]))
            self.stages[name], self.versions[name] = Stage.RUNNING, self.workers[worker]

    @rule(pick=picks)
    def advance(self, pick: int) -> None:
        able = self.at(Stage.RUNNING, Stage.GENERATED)
        if able:
            name = able[pick % len(able)]
            if self.stages[name] is Stage.RUNNING:
                self.window.generated(name, self.versions[name])
                self.stages[name] = Stage.GENERATED
            else:
                self.window.ready(name)
                self.stages[name] = Stage.READY

    @rule(pick=picks)
    def fail(self, pick: int) -> None:
        able = self.at(Stage.QUEUED, Stage.RUNNING, Stage.GENERATED, Stage.READY)
        if able:
            name = able[pick % len(able)]
            self.window.requeued(name)
            self.stages[name] = Stage.QUEUED
            self.versions.pop(name, None)

    @rule(pick=picks)
    def drop(self, pick: int) -> None:
        if self.stages:
            name = list(self.stages)[pick % len(self.stages)]
            self.window.dropped(name)
            self.forget(name)

    @rule(worker=st.integers(0, 1))
    def update_worker(self, worker: int) -> None:
        self.workers[worker] = self.published()

    @rule(ahead=st.integers(0, 1))
    def lease(self, ahead: int) -> None:
        step = self.step + ahead
        if step in self.leases.values() or (ahead and self.step not in self.leases.values()):
            return
        batch = self.window.select(self.at(Stage.READY), step)[: self.groups]
        if len(batch) < self.groups or self.window.may_begin(step, batch):
            return
        for name in self.window.doomed(step, batch):
            assert self.versions[name] + self.bound <= step
            self.window.dropped(name)
            self.forget(name)
        for name in batch:
            assert step - self.versions[name] <= self.bound
            self.window.leased(name, step)
            self.stages[name], self.leases[name] = Stage.LEASED, step

    @precondition(lambda self: self.step in self.leases.values())
    @rule()
    def train(self) -> None:
        done = [name for name, step in self.leases.items() if step == self.step]
        if not self.window.may_begin(self.step):
            assert sorted(self.window.trained(self.step)) == sorted(done)
            for name in done:
                self.forget(name)
            self.step += 1

    @rule()
    def release(self) -> None:
        last = max(self.leases.values(), default=None)
        for name in [name for name, step in self.leases.items() if step == last]:
            self.window.released(name)
            self.stages[name] = Stage.READY
            del self.leases[name]

    @invariant()
    def the_window_is_bounded_and_agrees_with_the_model(self) -> None:
        assert len(self.window) == len(self.stages) <= (self.bound + 1) * self.groups
        assert self.window.step == self.step
        counts = self.window.counts()
        assert all(counts[stage] == len(self.at(stage)) for stage in Stage)

    @invariant()
    def under_wait_all_that_has_started_can_still_be_trained_in_time(self) -> None:
        if self.policy == "drop":
            return
        assert self.window.stale() == []
        waiting = [version + self.bound for name, version in self.versions.items() if name not in self.leases]
        for last in range(self.step, self.step + self.bound + 1):
            places = (last - self.step + 1) * self.groups
            places -= sum(step <= last for step in self.leases.values())
            assert sum(due <= last for due in waiting) <= places

    def teardown(self) -> None:
        """Whatever happened, if engines and prompts go on so does the learner: no deadlock."""
        if not hasattr(self, "window"):
            return
        for _ in range(self.bound + 2):
            before = self.step
            for name in self.window.stale():
                self.window.dropped(name)
                self.forget(name)
            self.workers = [self.published()] * 2
            while self.window.can_admit():
                self.admit()
            for name in self.at(Stage.QUEUED):
                if self.window.min_version(name).version <= self.workers[0]:
                    self.start(0, 0)
            while self.at(Stage.RUNNING, Stage.GENERATED):
                self.advance(0)
            self.lease(0)
            self.train()
            assert self.step == before + 1


TestWorld = World.TestCase
TestWorld.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
