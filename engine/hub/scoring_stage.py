"""The stage between generation and training: scores each generated group and assigns its credit.

consumes    generated groups, one task each
produces    reward and advantage columns; ready groups; dropped or requeued ones
waits for   the reward, within a deadline
unblocked by the reward's outcomes
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from headrace.engine.errors import DeadlineError, HeadraceError
from headrace.engine.hub.credit import assign_credit, raw_rewards, shaped_rewards
from headrace.engine.hub.evaluation import EvalFlow
from headrace.engine.hub.flow import Ended
from headrace.engine.hub.scoring import Column, Stored, credit_columns, judge, reward_columns, reward_sample, samples_of
from headrace.engine.hub.state import HubState
from headrace.engine.interfaces import Algorithm, Reward
from headrace.engine.scheduling.refill import RefillBudget
from headrace.engine.transport.control import Span
from headrace.engine.types import DropReason, PromptGroup, RewardOutcome, RewardStatus

log = logging.getLogger(__name__)


class ScoringStage:
    """Runs the reward over generated groups; how many at a time is the reward's own limit."""

    def __init__(
        self,
        state: HubState,
        evals: EvalFlow,
        reward: Reward,
        algorithm: Algorithm,
        *,
        on_ended: Callable[[list[Ended]], None],
    ) -> None:
        self._state = state
        self._evals = evals
        self._reward = reward
        self._algorithm = algorithm
        self._on_ended = on_ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._refill: RefillBudget | None = None
        if algorithm.traits.filters_groups:
            rounds, per_step = state.config.algorithm.dynamic_sampling_rounds, state.config.schedule.groups_per_step
            self._refill = RefillBudget(rounds=rounds, groups_per_step=per_step)

    def submit(self, group: PromptGroup) -> None:
        """Score a generated group; returns at once."""
        task = asyncio.create_task(self._run(group), name=f"score {group.group_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel what is running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, group: PromptGroup) -> None:
        try:
            if self._evals.owns(group.group_id):
                await self._score_eval(group)
            else:
                await self._score_train(group)
        except HeadraceError as error:
            self._state.end("failed", error)
        except Exception as error:
            log.exception("scoring group %s failed", group.group_id)
            self._state.end("failed", HeadraceError(f"scoring group {group.group_id}: {type(error).__name__}: {error}"))

    async def _score_train(self, group: PromptGroup) -> None:
        if not self._state.flow.is_current(group.group_id, group.attempt):
            return  # it ended before this task began
        records: Sequence[Stored] = self._state.train.table.records_of(group.group_id)
        outcomes = await self._outcomes(records)
        if not self._state.flow.is_current(group.group_id, group.attempt):
            return
        judgement = judge(outcomes, self._state.config.reward)
        self._state.reporting.parts.add("reward/failed", judgement.failed)
        if judgement.values is None:
            self._unscored(group, judgement.why)
            return
        raw = raw_rewards([record.header for record in records], judgement.values)
        if self._refill is not None:
            if not self._algorithm.keeps(raw):
                self._replace(group)
                self._refill.filtered(judgement.values)
                return
            self._refill.kept(judgement.values)
        self._add(reward_columns(records, judgement.values))
        if self._algorithm.traits.credit_scope == "group":
            (credit,) = assign_credit([shaped_rewards(raw, self._algorithm)], self._algorithm)
            self._add(credit_columns(records, credit))
        for outcome in outcomes:
            for name, value in outcome.metrics.items():
                self._state.reporting.parts.add(f"reward/{name}", value)
        self._state.flow.ready(group.group_id, group.attempt)
        self._state.streak.succeeded()
        self._state.progressed()
        self._state.changed()

    async def _score_eval(self, group: PromptGroup) -> None:
        records: Sequence[Stored] = self._state.evals.table.records_of(group.group_id)
        (outcome,) = await self._outcomes(records)
        (trajectory,) = samples_of(records)
        if outcome.status is not RewardStatus.OK:
            log.warning("the answer to %s got no reward: %s", group.prompt.prompt_id, outcome.message)
        self._state.evals.drop_group(group.group_id, "evaluated")
        self._evals.scored(group.group_id, trajectory, outcome)
        self._state.progressed()
        self._state.changed()

    async def _outcomes(self, records: Sequence[Stored]) -> list[RewardOutcome]:
        """One outcome a record, in order.

        Raises:
            DeadlineError: The reward did not answer, with all its retries.
        """
        config = self._state.config.reward
        started_s = self._state.clock.wall()
        limit_s = config.connect_timeout_s + config.timeout_s * (config.retries + 2)
        try:
            async with asyncio.timeout(limit_s):
                outcomes = await self._reward.score([reward_sample(t) for t in samples_of(records)])
        except TimeoutError:
            raise DeadlineError(
                f"the reward gave no answer to {len(records)} samples within {limit_s:g} s; see reward.timeout_s"
            ) from None
        ended_s = self._state.clock.wall()
        self._state.reporting.parts.add("reward/latency_s", ended_s - started_s)
        self._state.reporting.spans([Span(track="reward", name="score", start_s=started_s, end_s=ended_s)])
        assert len(outcomes) == len(records), "a reward answers each sample once"
        return outcomes

    def _add(self, columns: Sequence[Column]) -> None:
        for column in columns:
            verdict = self._state.train.add_column(column.record_id, column.name, column.data)
            assert verdict.accepted, verdict.reason

    def _replace(self, group: PromptGroup) -> None:
        """Drop a group that teaches nothing; another prompt takes its place."""
        self._state.reporting.parts.add("groups/filtered", 1)
        self._on_ended(self._state.flow.drop(group.group_id, group.attempt, DropReason.ZERO_VARIANCE))
        self._state.streak.succeeded()
        self._state.progressed()
        self._state.changed()

    def _unscored(self, group: PromptGroup, why: str) -> None:
        self._state.attempt_failed(group, why)
        flow = self._state.flow
        if self._state.config.reward.on_failure == "requeue":
            ended = flow.requeue(group.group_id, group.attempt, why, DropReason.REWARD_FAILED)
        else:
            ended = flow.drop(group.group_id, group.attempt, DropReason.REWARD_FAILED)
        current = flow.group(group.group_id)
        if current is not None:
            self._state.train.requeue(group.group_id, current.attempt)
        self._on_ended(ended)
        self._state.changed()
