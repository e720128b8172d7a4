"""The hub's side of the workers' streams, evaluations and scoring, driven without sockets."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from headrace.engine.config import AlgorithmConfig
from headrace.engine.hub.evaluation import EvalFlow, Evaluator
from headrace.engine.hub.flow import Ended
from headrace.engine.hub.members import Member
from headrace.engine.hub.rollouts import Rollouts
from headrace.engine.hub.scoring_stage import ScoringStage
from headrace.engine.hub.state import HubState
from headrace.engine.plugins import load_entry_point
from headrace.engine.transport.convert import version_to_proto
from headrace.engine.types import DropReason, PolicyVersion, Prompt, PromptGroup, RewardOutcome, RewardSample
from headrace.v1 import control_pb2 as pb_control
from headrace.v1 import rollout_pb2 as pb

START = PolicyVersion(0, 0)


@dataclass
class Bench:
    state: HubState
    evals: EvalFlow
    rollouts: Rollouts
    generated: list[PromptGroup]
    ended: list[Ended]


class Worker:
    """One Work stream."""

    def __init__(self, rollouts: Rollouts, name: str = "w") -> None:
        self._name = name
        self._requests: asyncio.Queue[pb.WorkRequest] = asyncio.Queue()
        stream = rollouts.Work(self._sent(), cast(Any, None))
        self._commands = cast("AsyncGenerator[pb.WorkResponse, None]", stream)
        self.got: asyncio.Queue[pb.WorkResponse] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    def say(self, **event: Any) -> None:
        self._requests.put_nowait(pb.WorkRequest(worker_id=self._name, **event))

    def enlist(self, capacity: int = 16) -> None:
        self.say(serving=version_to_proto(START))
        self.say(capacity=capacity)

    async def next(self) -> pb.WorkResponse:
        return await asyncio.wait_for(self.got.get(), 30)

    async def leave(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._commands.aclose()

    async def _sent(self) -> AsyncIterator[pb.WorkRequest]:
        while True:
            yield await self._requests.get()

    async def _read(self) -> None:
        async for command in self._commands:
            self.got.put_nowait(command)


def bench(state: HubState) -> Bench:
    evals = EvalFlow(state.config)
    generated: list[PromptGroup] = []
    ended: list[Ended] = []
    holder: list[Rollouts] = []

    def on_ended(some: list[Ended]) -> None:  # as the hub does
        ended.extend(some)
        holder[0].cancel(some)
        holder[0].pump()

    rollouts = Rollouts(state, evals, on_generated=generated.append, on_ended=on_ended)
    holder.append(rollouts)
    return Bench(state, evals, rollouts, generated, ended)


async def test_held_out_prompts_go_out_although_nothing_else_happens(hub_state: HubState) -> None:
    """After the last step, without a version to publish, no worker says anything any more."""
    it = bench(hub_state)
    worker = Worker(it.rollouts)
    worker.enlist()
    it.state.flow.admit(Prompt(prompt_id="p", token_ids=(1,)))
    it.rollouts.pump()
    await worker.next()  # it is enlisted
    evaluator = Evaluator(
        it.state, it.evals, [Prompt(prompt_id="e", token_ids=(1,))], "task", on_begun=it.rollouts.pump
    )
    running = asyncio.create_task(evaluator.run(0, START))
    assert (await worker.next()).group.table == "eval"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await worker.leave()


async def test_the_step_that_an_evaluation_holds_back_begins_with_the_last_answer(hub_state: HubState) -> None:
    """Nobody scores here: the rewards of the held-out prompts overlap with training."""
    it = bench(hub_state)
    worker = Worker(it.rollouts)
    worker.enlist()
    prompt = Prompt(prompt_id="e", token_ids=(1,))
    evaluator = Evaluator(it.state, it.evals, [prompt], "task", on_begun=it.rollouts.pump)
    it.state.hold_step = 0
    running = asyncio.create_task(evaluator.run(0, START))
    group = (await worker.next()).group
    assert it.state.hold_step == 0
    worker.say(group_ended=pb.GroupEnded(group_id=group.group_id, status=pb.GroupEnded.STATUS_GENERATED))
    async with asyncio.timeout(30):
        while it.state.hold_step == 0:  # noqa: ASYNC110  # a number that nobody tells of
            await asyncio.sleep(0)
    assert not running.done() and [one.group_id for one in it.generated] == [group.group_id]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await worker.leave()


async def test_a_worker_that_has_not_said_what_it_can_do_does_not_stop_a_run_from_ending(hub_state: HubState) -> None:
    it = bench(hub_state)
    worker = Worker(it.rollouts)
    worker.say()
    worker.say(serving=version_to_proto(START))
    for _ in range(10):  # until both messages are read
        await asyncio.sleep(0)
    assert it.rollouts.serving() == {"w": START}
    it.rollouts.drain()
    assert (await worker.next()).drain
    await worker.leave()


async def test_a_worker_that_takes_groups_counts_as_loaded_before_its_heartbeat_says_so(hub_state: HubState) -> None:
    it = bench(hub_state)
    joined = Member(member_id="w", role="rollout", rank=0, pid=1, host="h", heard_s=0.0, moved_s=0.0)
    hub_state.members.join(joined)
    hub_state.members.beat(pb_control.HeartbeatRequest(member_id="w", phase=pb_control.PHASE_LOADING), 0.0, 0.0)
    assert joined.is_loading
    worker = Worker(it.rollouts)
    worker.enlist()
    it.state.flow.admit(Prompt(prompt_id="p", token_ids=(1,)))
    it.rollouts.pump()
    await worker.next()
    assert not joined.is_loading and joined.heard_s > 0.0
    await worker.leave()


async def test_what_waits_for_a_worker_is_not_sent_to_the_one_that_is_being_lost(hub_state: HubState) -> None:
    it = bench(hub_state)
    worker = Worker(it.rollouts)
    worker.enlist()
    it.state.flow.admit(Prompt(prompt_id="p", token_ids=(1,)))
    it.rollouts.pump()
    await worker.next()
    it.evals.begin(0, [Prompt(prompt_id="e", token_ids=(1,))], START)
    await worker.leave()
    other = Worker(it.rollouts, "other")
    other.enlist()
    tables = {(await other.next()).group.table for _ in range(2)}
    assert tables == {"eval", "train"}
    await other.leave()


async def test_a_held_out_prompt_that_a_worker_holds_for_too_long_is_given_out_again(hub_state: HubState) -> None:
    it = bench(hub_state)
    worker = Worker(it.rollouts)
    worker.enlist()
    it.evals.begin(0, [Prompt(prompt_id="e", token_ids=(1,))], START)
    first = (await worker.next()).group
    it.rollouts.overdue(hub_state.clock.monotonic() + hub_state.config.rollout.request_timeout_s + 60)
    second = (await worker.next()).group
    assert (second.group_id, second.attempt) == (first.group_id, first.attempt + 1)
    await worker.leave()


async def test_the_spans_of_a_lost_worker_are_over(hub_state: HubState) -> None:
    it = bench(hub_state)
    worker = Worker(it.rollouts)
    worker.enlist()
    it.evals.begin(0, [Prompt(prompt_id="e", token_ids=(1,))], START)
    hub_state.flow.admit(Prompt(prompt_id="p", token_ids=(1,)))
    it.rollouts.pump()
    for _ in range(2):
        await worker.next()
    lost_s = hub_state.clock.wall()
    await worker.leave()
    figures = hub_state.reporting.timeline.figures(lost_s + 10, lost_s + 20)
    assert figures["idle_ratio/rollout"] == 1.0


@dataclass
class NoReward:
    """Must not be asked."""

    asked: list[str] = field(default_factory=list[str])

    async def score(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        self.asked += [sample.sample_id for sample in samples]
        return []


async def test_a_group_that_ends_before_its_scoring_begins_does_not_end_the_run(hub_state: HubState) -> None:
    it = bench(hub_state)
    reward = NoReward()
    method = cast(Any, load_entry_point("headrace.algorithms", "grpo"))(AlgorithmConfig())
    stage = ScoringStage(it.state, it.evals, cast(Any, reward), method, on_ended=it.ended.extend)
    group = it.state.flow.admit(Prompt(prompt_id="p", token_ids=(1,)))
    stage.submit(group)
    it.state.flow.drop(group.group_id, group.attempt, DropReason.STALE)
    it.state.train.drop_group(group.group_id, "stale")
    for _ in range(3):
        await asyncio.sleep(0)
    assert it.state.ended == "" and not reward.asked
    await stage.close()
