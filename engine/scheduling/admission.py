"""The admission half of the staleness window: which groups are in it, from which version each may be generated.

The invariants stand at the head of `staleness.py`, which adds what a step may and must train on.
"""

from collections.abc import Mapping

from headrace.engine.errors import BufferFullError, ConfigError, InputError
from headrace.engine.scheduling.lag import FIRST, LagRule, Measure
from headrace.engine.scheduling.places import Places
from headrace.engine.scheduling.window import Admission, Stage, StalePolicy, WindowGroup
from headrace.engine.types import PolicyVersion


class AdmissionWindow:
    """Bounds how far rollout runs ahead of the learner. Use it as `StalenessWindow`.

    Args:
        groups_per_step: G, groups in a batch.
        max_staleness: S, the largest lag that is trained on; 0 is on-policy.
        weight_sync_steps: Every so many steps a version is published.
        measure: Which token of a sample speaks for it.
        policy: "wait": the learner waits for a group that would expire; "drop": such a group is dropped.
        start: The version that the run begins with; its number is the first step.
        ancestry: See `LagRule`.

    Raises:
        ConfigError: `groups_per_step` is below 1, or max_staleness < weight_sync_steps - 1.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        weight_sync_steps: int = 1,
        measure: Measure = "oldest",
        policy: StalePolicy = "wait",
        *,
        start: PolicyVersion = FIRST,
        ancestry: Mapping[int, int] | None = None,
    ) -> None:
        if groups_per_step < 1:
            raise ConfigError(f"groups_per_step {groups_per_step} was given; it must be at least 1")
        self.rule = LagRule(
            max_staleness=max_staleness,
            weight_sync_steps=weight_sync_steps,
            measure=measure,
            start=start,
            ancestry=dict(ancestry or {}),
        )
        self.policy: StalePolicy = policy
        self.groups_per_step = groups_per_step
        self.capacity = (max_staleness + 1) * groups_per_step
        self._step = start.version
        self._places = Places(groups_per_step)
        self._groups: dict[str, WindowGroup] = {}  # in order of admission
        self._admitted = 0
        self._restamped: set[str] = set()
        self._moved = False  # a place became free since min_versions were worked out: they could be lower
        self._short = False  # a place was taken since then: they may have to be higher

    @property
    def step(self) -> int:
        """The step that is trained next, or now; also the number of the newest version."""
        return self._step

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def counts(self) -> dict[Stage, int]:
        """Groups in the window, by stage."""
        found = dict.fromkeys(Stage, 0)
        for group in self._groups.values():
            found[group.stage] += 1
        return found

    def check(self, version: float | None = None) -> Admission:
        """Whether a group may enter now; `version` is what an external group counts as (`rule.measured`).

        Raises:
            InputError: `version` is newer than the learner's.
        """
        if version is not None and version > self._step:
            raise InputError(f"a group of version {version:g} was pushed, but the learner is only at {self._step}")
        if version is not None and self.rule.expiry(version) < self._step:
            return Admission.STALE
        self._settle()
        if len(self._groups) >= self.capacity:
            return Admission.FULL
        if version is not None and not self._places.fits(self.rule.expiry(version), self._step):
            return Admission.CROWDED
        return Admission.OK

    def can_admit(self, version: float | None = None) -> bool:
        """Whether `admit` would take a group now."""
        return self.check(version) is Admission.OK

    def admit(self, group_id: str, version: float | None = None) -> PolicyVersion:
        """Take a group in; returns the oldest version that may generate it.

        Args:
            group_id: Not in the window.
            version: Of a group that an external client has generated: what it counts as (`rule.measured`).

        Raises:
            BufferFullError: The window is full or crowded.
            InputError: The id is in the window already, or an external group is stale or newer than the learner.
        """
        if group_id in self._groups:
            raise InputError(f"group {group_id!r} is in the staleness window already; admit each group once")
        verdict = self.check(version)
        if verdict is Admission.STALE:
            raise InputError(
                f"group {group_id!r} of version {version} is stale at step {self._step}, for max_staleness is "
                f"{self.rule.max_staleness}; generate it with newer weights"
            )
        if verdict is not Admission.OK:
            raise BufferFullError(
                f"group {group_id!r} was not admitted ({verdict.value}): {len(self._groups)} of {self.capacity} places "
                "are taken; wait until a group is trained or dropped"
            )
        self._admitted += 1
        group = WindowGroup(group_id, self._admitted)
        self._groups[group_id] = group
        if version is None:
            self._queue(group)
            self._restamped.discard(group_id)
        else:
            group.stage = Stage.GENERATED
            group.version, group.due = version, self.rule.expiry(version)
            group.min_version = group.due - self.rule.max_staleness
            self._places.wait(group.due)
        return self._named(group.min_version)

    def min_version(self, group_id: str) -> PolicyVersion:
        """The oldest version that may generate this group, as of now."""
        self._settle()
        return self._named(self._find(group_id).min_version)

    def restamped(self) -> dict[str, PolicyVersion]:
        """Groups not yet started whose `min_version` changed since the last call. Ask before dispatching."""
        if self._moved or self._short:
            self._restamp()
        names, self._restamped = self._restamped, set()
        groups = (self._groups[name] for name in names if name in self._groups)
        return {group.group_id: self._named(group.min_version) for group in groups if group.stage is Stage.QUEUED}

    def started(self, group_id: str, version: PolicyVersion) -> None:
        """An engine that serves `version` took the group. Called again for a later sample, the oldest counts.

        Call it when the group is dispatched: no token will be older than what the engine serves then.

        Raises:
            InputError: The version is older than the group's `min_version`, or of a lost future.
        """
        group = self._expect(group_id, Stage.QUEUED, Stage.RUNNING)
        self._settle()
        number = self.rule.number(version)
        if number < group.min_version:
            raise InputError(
                f"group {group_id!r} was started under version {version} but needs {self._named(group.min_version)}; "
                "requeue it on an engine that serves that"
            )
        self._age(group, number if group.version is None else min(number, group.version))
        group.stage = Stage.RUNNING

    def progressed(self, group_id: str, version: float) -> None:
        """What the tokens so far count as (`rule.measured`); by the mean or newest token it grows."""
        group = self._expect(group_id, Stage.RUNNING)
        assert group.version is not None
        self._age(group, max(version, group.version))

    def generated(self, group_id: str, version: float) -> None:
        """All samples are there; `version` is what they count as (`rule.measured`), whatever was expected."""
        group = self._expect(group_id, Stage.QUEUED, Stage.RUNNING, Stage.GENERATED)
        self._age(group, version)
        group.stage = Stage.GENERATED

    def ready(self, group_id: str) -> None:
        """Every column that training needs is there."""
        self._expect(group_id, Stage.GENERATED).stage = Stage.READY

    def leased(self, group_id: str, step: int) -> None:
        """The group is in the batch of `step`, which may lie ahead of the current one (prefetch).

        Raises:
            InputError: The step is over, or the group's lag for it is over the bound.
        """
        group = self._expect(group_id, Stage.READY)
        if not self._step <= step <= group.due:
            raise InputError(
                f"group {group_id!r} cannot be leased for step {step}: it may be trained from step {self._step} to "
                f"step {group.due}; choose the batch with select()"
            )
        self._places.leave(group.due)
        self._places.lease(step)
        group.stage, group.step = Stage.LEASED, step
        self._short = True

    def released(self, group_id: str) -> None:
        """The lease was given back: the group is ready again, and as old as it is."""
        group = self._expect(group_id, Stage.LEASED)
        self._vacate(group)
        group.stage = Stage.READY
        self._places.wait(group.due)

    def requeued(self, group_id: str) -> PolicyVersion:
        """A new attempt begins from nothing, in the group's old place of the order; returns its `min_version`."""
        group = self._expect(group_id, Stage.QUEUED, Stage.RUNNING, Stage.GENERATED, Stage.READY)
        self._settle()
        self._vacate(group)
        self._queue(group)
        return self._named(group.min_version)

    def dropped(self, group_id: str) -> None:
        """The group leaves untrained, from any stage; its place is free for another."""
        self._vacate(self._find(group_id))
        del self._groups[group_id]

    def trained(self, step: int) -> list[str]:
        """The step is over (a skipped one too): its groups leave and are named; the next step is current.

        Raises:
            InputError: `step` is not the current step.
        """
        if step != self._step:
            raise InputError(f"step {step} was reported as trained, but the current step is {self._step}")
        done = [group for group in self._groups.values() if group.step == step]
        for group in done:
            self.dropped(group.group_id)
        self._step += 1
        self._restamp()
        return [group.group_id for group in done]

    def _queue(self, group: WindowGroup) -> None:
        """Give a group that starts from nothing the oldest published min_version that leaves room for all."""
        group.stage, group.version = Stage.QUEUED, None
        oldest = self.rule.published_from(self._step - self.rule.max_staleness)
        while not self._places.fits(oldest + self.rule.max_staleness, self._step):
            oldest = self.rule.published_from(oldest + 1)
        if group.min_version != oldest:
            self._restamped.add(group.group_id)
        group.min_version, group.due = oldest, oldest + self.rule.max_staleness
        self._places.wait(group.due)

    def _restamp(self) -> None:
        """Work out the min_version of every group that has not started, in order of admission."""
        queued = [group for group in self._groups.values() if group.stage is Stage.QUEUED]
        for group in queued:
            self._places.leave(group.due)
        for group in queued:
            self._queue(group)
        self._moved = self._short = False

    def _settle(self) -> None:
        """A lease may have taken the place that a group was to have which has not started: move that group on."""
        if self._short:
            self._restamp()

    def _vacate(self, group: WindowGroup) -> None:
        """Take back the place that the group waits for, or has leased."""
        if group.step is None:
            self._places.leave(group.due)
        else:
            self._places.release(group.step)
            group.step = None
        self._moved = True

    def _age(self, group: WindowGroup, version: float) -> None:
        """Set what a waiting group counts as."""
        self._places.leave(group.due)
        group.version, group.due = version, self.rule.expiry(version)
        self._places.wait(group.due)

    def _named(self, number: int) -> PolicyVersion:
        return PolicyVersion(self.rule.start.incarnation, number)

    def _find(self, group_id: str) -> WindowGroup:
        group = self._groups.get(group_id)
        if group is None:
            raise InputError(f"group {group_id!r} is not in the staleness window; it was never admitted or has left")
        return group

    def _expect(self, group_id: str, *stages: Stage) -> WindowGroup:
        group = self._find(group_id)
        if group.stage not in stages:
            allowed = ", ".join(stage.name.lower() for stage in stages)
            raise InputError(
                f"group {group_id!r} is {group.stage.name.lower()}; this event is for a group that is {allowed}"
            )
        return group
