"""Held-out prompts between steps: pinned to one version, outside the training window.

`EvalFlow` is a pure state machine; `Evaluator` runs it against the hub. While the answers are generated the next step
is held back, so that every answer comes from the version that is evaluated; scoring overlaps with training again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.engine.config import Config
from headrace.engine.hub.flow import Dispatch
from headrace.engine.hub.state import HubState
from headrace.engine.hub.waits import Wait
from headrace.engine.scheduling.inflight import DispatchQueue
from headrace.engine.types import (
    PolicyVersion,
    Prompt,
    PromptGroup,
    RewardOutcome,
    RewardStatus,
    SamplingParams,
    Trajectory,
)

TABLE = "eval"


@dataclass(slots=True, kw_only=True)
class Round:
    """One evaluation.

    Attributes:
        generating: Groups that have no answer yet.
        scoring: Groups that have an answer and no reward yet.
        results: Answers with their rewards.
        failed: Prompts that got no answer or no reward in all their attempts.
    """

    step: int
    generating: set[str] = field(default_factory=set[str])
    scoring: set[str] = field(default_factory=set[str])
    results: list[tuple[Trajectory, RewardOutcome]] = field(default_factory=list[tuple[Trajectory, RewardOutcome]])
    failed: int = 0

    @property
    def is_done(self) -> bool:
        """Every prompt has a result or has failed."""
        return not self.generating and not self.scoring


class EvalFlow:
    """Groups of one sample each, for the evaluation that is going on.

    Invariant: a group is generating, scoring, or over; what is said of an earlier attempt changes nothing.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._queue = DispatchQueue()
        self._workers: set[str] = set()
        self._groups: dict[str, PromptGroup] = {}
        self.round: Round | None = None

    @property
    def sampling(self) -> SamplingParams:
        """How evaluation prompts are sampled."""
        rollout = self._config.rollout
        return SamplingParams(
            temperature=self._config.eval.temperature, max_tokens=rollout.max_tokens, stop=rollout.stop
        )

    def begin(self, step: int, prompts: Sequence[Prompt], version: PolicyVersion) -> Round:
        """Start an evaluation after `step` steps, of exactly this version. The one before must be over."""
        assert self.round is None or self.round.is_done, "one evaluation at a time"
        self.round = Round(step=step)
        for index, prompt in enumerate(prompts):
            group = PromptGroup(
                group_id=f"eval{version.incarnation}-{step}-{index}",
                prompt=prompt,
                group_size=1,
                min_version=version,
                sampling=self.sampling,
                table=TABLE,
            )
            self._groups[group.group_id] = group
            self.round.generating.add(group.group_id)
            self._queue.push(group.group_id, version)
        return self.round

    def owns(self, group_id: str) -> bool:
        """Whether this is an evaluation's group, over or not."""
        return group_id.startswith("eval")

    def is_current(self, group_id: str, attempt: int) -> bool:
        """The group is not over and this is its attempt."""
        group = self._groups.get(group_id)
        return group is not None and group.attempt == attempt

    def enlist(self, worker: str, num_groups: int, serving: PolicyVersion) -> None:
        """A worker takes so many groups at a time and serves this version."""
        if worker in self._workers:
            self._queue.set_credits(worker, num_groups)
            self._queue.set_version(worker, serving)
        else:
            self._workers.add(worker)
            self._queue.add_worker(worker, num_groups, serving)

    def worker_lost(self, worker: str) -> list[PromptGroup]:
        """Its groups begin anew elsewhere, as the same attempt: nothing of it can have been accepted twice."""
        if worker not in self._workers:
            return []
        self._workers.remove(worker)
        return [self._groups[group_id] for group_id in self._queue.worker_lost(worker)]

    def next_dispatch(self) -> Dispatch | None:
        """The next group to send; None when no worker can take one."""
        assignment = self._queue.next_assignment()
        if assignment is None:
            return None
        return Dispatch(worker=assignment.worker, group=self._groups[assignment.group_id])

    def ended(self, group_id: str, attempt: int, is_generated: bool) -> PromptGroup | None:
        """A worker is done with a group; returns it if it is to be scored now."""
        if not self.is_current(group_id, attempt) or self.round is None or group_id not in self.round.generating:
            return None
        group = self._groups[group_id]
        if is_generated:
            self._queue.finished(group_id)
            self.round.generating.remove(group_id)
            self.round.scoring.add(group_id)
            return group
        if attempt < self._config.rollout.request_retries:
            self._groups[group_id] = msgspec.structs.replace(group, attempt=attempt + 1)
            self._queue.returned(group_id)
        else:
            self._queue.cancel(group_id)
            self.round.generating.remove(group_id)
            self._over(group_id, failed=True)
        return None

    def scored(self, group_id: str, trajectory: Trajectory, outcome: RewardOutcome) -> None:
        """The answer's outcome; one without a value counts as failed."""
        assert self.round is not None
        self.round.scoring.remove(group_id)
        is_scored = outcome.status is RewardStatus.OK
        if is_scored:
            self.round.results.append((trajectory, outcome))
        self._over(group_id, failed=not is_scored)

    def _over(self, group_id: str, *, failed: bool) -> None:
        assert self.round is not None
        self.round.failed += failed
        del self._groups[group_id]


class Evaluator:
    """Runs evaluations before the steps that the configuration names, and after the last one."""

    def __init__(
        self,
        state: HubState,
        flow: EvalFlow,
        prompts: Sequence[Prompt],
        name: str,
        *,
        on_begun: Callable[[], None],
    ) -> None:
        self._state = state
        self._on_begun = on_begun
        self._flow = flow
        self._prompts = prompts
        self._name = name

    def is_due(self, step: int) -> bool:
        """Whether there is an evaluation after `step` steps."""
        config = self._state.config
        every = config.eval.every_steps
        if not self._prompts:
            return False
        return step in (0, config.run.steps) or (every > 0 and step % every == 0)

    async def run(self, step: int, version: PolicyVersion) -> None:
        """Evaluate `version`, which is the one after `step` steps; the step after it must be held until this says so.

        Raises:
            DeadlineError: No answers or rewards within `timeouts.no_progress_s`.
            StoppedError: The run is ending.
        """
        state = self._state
        started_s = state.clock.monotonic()
        current = self._flow.begin(step, self._prompts, version)
        # Nothing else may happen any more that would send the groups out: after the last step all workers may be idle.
        self._on_begun()
        state.changed()
        await self._until(lambda: not current.generating, "the answers to the held-out prompts", "the rollout workers")
        # Not just None: a batch may be asked for ahead before this evaluation is over.
        state.hold_step = next(filter(self.is_due, range(step + 1, state.config.run.steps + 1)), None)
        state.changed()
        await self._until(lambda: current.is_done, "the rewards of the held-out prompts", "the reward")
        if current.results:
            state.reporting.evaluated(step, self._name, current.results, state.config.eval.threshold)
        took_s = state.clock.monotonic() - started_s
        failed = f", {current.failed} without a result" if current.failed else ""
        state.reporting.say(f"evaluated {len(current.results)} prompts after step {step} in {took_s:.1f} s{failed}")

    async def _until(self, condition: Callable[[], bool], what: str, whom: str) -> None:
        state = self._state

        def holds() -> bool:
            state.refuse_if_ended()
            return condition()

        deadline_s = state.clock.monotonic() + state.config.timeouts.no_progress_s
        await state.changes.wait_until(
            holds, Wait(role="hub", member="evaluation", waits_for=what, on_whom=whom, deadline_s=deadline_s)
        )
