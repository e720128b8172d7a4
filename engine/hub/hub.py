"""The hub: engine of a run on one event loop, between prompt source, workers, reward and learner.

consumes    a configuration
produces    a run folder; trained weights
waits for   its children and its loops; each of their waits is on the board
"""

import asyncio
import logging
import shutil
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from headrace.engine.clock import SystemClock
from headrace.engine.config import Config
from headrace.engine.errors import HeadraceError, NoProgressError, StoppedError
from headrace.engine.hub.actors import Actors
from headrace.engine.hub.batches import HubBuffer
from headrace.engine.hub.composition import Parts, Resume, make_table
from headrace.engine.hub.control import ControlHub
from headrace.engine.hub.credit import columns_before_lease
from headrace.engine.hub.evaluation import EvalFlow, Evaluator
from headrace.engine.hub.flow import Ended, GroupFlow
from headrace.engine.hub.members import Limits, Members
from headrace.engine.hub.payloads import PayloadFolder
from headrace.engine.hub.reporting import Reporting
from headrace.engine.hub.rollouts import Rollouts
from headrace.engine.hub.scoring_stage import ScoringStage
from headrace.engine.hub.services import hub_services
from headrace.engine.hub.state import HubState
from headrace.engine.hub.streak import FailureStreak, prompts_ran_out
from headrace.engine.hub.waits import Changes, Wait, WaitBoard
from headrace.engine.hub.weights import WeightHub
from headrace.engine.supervision.guardian import Guardian
from headrace.engine.telemetry.loop_lag import LoopLag
from headrace.engine.telemetry.run_folder import RunFolder
from headrace.engine.transport.server import GrpcServer
from headrace.engine.types import PolicyVersion, PromptGroup

log = logging.getLogger(__name__)

_TICK_S = 0.5


class Hub:
    """One run, from its first prompt to its last version."""

    def __init__(self, config: Config, folder: RunFolder, parts: Parts, *, resume: Resume | None = None) -> None:
        clock = SystemClock()
        start = PolicyVersion(0, 0) if resume is None else resume.version
        board = WaitBoard(clock)
        timeouts = config.timeouts
        run_id = uuid.uuid4().hex[:12]
        self.state = HubState(
            run_id=run_id,
            config=config,
            clock=clock,
            board=board,
            changes=Changes(clock, board),
            flow=GroupFlow(config, start, clock),
            members=Members(
                Limits(
                    silent_s=timeouts.heartbeat_s,
                    loading_s=timeouts.start_s,
                    working_s=max(config.learner.step_timeout_s, timeouts.no_progress_s),
                )
            ),
            reporting=Reporting(folder, clock),
            streak=FailureStreak(config.schedule.groups_per_step),
            train=make_table("train", columns_before_lease(parts.algorithm), config, board, start.version),
            evals=make_table("eval", (), config, board, 0),
            version=start,
            resume_from="" if resume is None else str(resume.checkpoint),
            last_progress_s=clock.monotonic(),
        )
        self._folder = folder
        self._parts = parts
        if resume is not None:
            parts.source.restore(resume.prompts)
        self._evals = EvalFlow(config)
        self._lag = LoopLag(clock)
        self._guardian: Guardian | None = None
        self._payloads: PayloadFolder | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[GrpcServer] = []
        self._final_evaluation_done = False

    async def run(self, address: str) -> None:
        """Run to the end; afterwards `state.ended` tells how. Cancelling stops the children and closes everything.

        Args:
            address: Where the hub listens.

        Raises:
            ConfigError: The address cannot be bound.
        """
        state = self.state
        try:
            await self._start(address)
            await state.changes.wait_until(
                lambda: bool(state.ended), Wait(role="hub", member="run", waits_for="the end of the run")
            )
            await self._wind_down()
        finally:
            await self._close()

    # Beginning and end

    async def _start(self, address: str) -> None:
        state = self.state
        self._guardian = Guardian()
        self._guardian.remove(self._folder.socket_folder)
        self._payloads = PayloadFolder(state.run_id)
        self._guardian.remove(self._payloads.path)
        state.payload_dir = str(self._payloads.path)
        self._buffer = HubBuffer(state, self._evals, self._parts.algorithm, on_ended=self._groups_ended)
        self._weights = WeightHub(state, Path(state.payload_dir))
        self._rollouts = Rollouts(state, self._evals, on_generated=self._group_generated, on_ended=self._groups_ended)
        control = ControlHub(state, self._checkpoint_state)
        reward_address = f"unix:{self._folder.socket_path('reward')}"
        self._reward = self._parts.make_reward(reward_address)
        self._scoring = ScoringStage(
            state, self._evals, self._reward, self._parts.algorithm, on_ended=self._groups_ended
        )
        server = GrpcServer(hub_services(self._buffer, control, self._rollouts, self._weights), address)
        await server.start()
        self._servers.append(server)
        logs = self._folder.path / "logs"
        logs.mkdir(exist_ok=True)
        self._actors = Actors(state, server.address, self._guardian, logs)
        if state.config.reward.function:
            self._actors.start_reward(reward_address)
        if state.config.rollout.launch == "engine":
            self._actors.start_rollouts()
        if state.config.learner.launch == "engine":
            self._actors.start_learners(self._folder.socket_path("rendezvous"))
        for loop in (self._reach_reward, self._admit, self._watch_over, self._evaluate, self._lag.run):
            self._spawn_loop(loop)

    def _spawn_loop(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def guarded() -> None:
            try:
                await loop()
            except StoppedError:
                return
            except HeadraceError as error:
                self.state.end("failed", error)
            except Exception as error:
                log.exception("a loop of the hub failed")
                self.state.end("failed", HeadraceError(f"the hub failed: {type(error).__name__}: {error}"))

        self._tasks.add(asyncio.create_task(guarded(), name=loop.__name__))

    async def _wind_down(self) -> None:
        """Let members hear of the end and leave by themselves, within the grace period."""
        grace_s = self.state.config.timeouts.stop_s
        self._rollouts.drain()
        await self._actors.learners_done(grace_s)

    async def _close(self) -> None:
        state = self.state
        state.end("stopped")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "_actors"):
            await self._actors.stop(state.config.timeouts.stop_s)
            await self._scoring.close()
            await self._reward.close()
        try:
            state.reporting.close()
        except HeadraceError as error:
            log.error("the end of the run could not be written down: %s", error)
        for server in self._servers:
            await server.stop(1.0)
        if self._payloads is not None:
            self._payloads.close()
        shutil.rmtree(self._folder.path / "weights", ignore_errors=True)  # where shared memory was too small
        self._folder.close()
        if self._guardian is not None:
            await asyncio.to_thread(self._guardian.close)

    # Loops

    async def _reach_reward(self) -> None:
        """A reward server that nobody answers at ends the run now, not when the model has loaded and sampled."""
        await self._reward.start()

    async def _admit(self) -> None:
        """Take prompts while the window has room."""
        state = self.state
        while True:
            await self._until(state.flow.may_admit, "admission", "room in the staleness window", "the learner")
            prompt = await self._parts.source.next()
            if prompt is None:
                self._source_is_empty()
                return
            state.flow.admit(prompt)
            self._rollouts.pump()

    def _source_is_empty(self) -> None:
        """Without more prompts the run can only end early; say so once the last groups cannot fill a step."""
        state = self.state
        state.reporting.say("the prompt source has no more prompts")
        self._spawn_loop(self._end_when_dry)

    async def _end_when_dry(self) -> None:
        state = self.state
        per_step = state.config.schedule.groups_per_step
        await self._until(lambda: len(state.flow.window) < per_step, "admission", "the last whole steps", "the learner")
        if state.flow.window.step < state.config.run.steps:
            step, left = state.flow.window.step, len(state.flow.window)
            raise prompts_ran_out(state.config, step, left, state.flow.ledger.counts().dropped)

    async def _evaluate(self) -> None:
        """Evaluate where it is due; ends the run after the last evaluation."""
        state = self.state
        evaluator = Evaluator(
            state, self._evals, self._parts.eval_prompts, self._parts.eval_name, on_begun=self._rollouts.pump
        )
        first, last = state.flow.window.step, state.config.run.steps
        for step in (step for step in range(first, last + 1) if evaluator.is_due(step)):
            if state.resume_from and step == first and self._folder.has_evaluation(step):
                continue
            state.hold_step = step
            await self._until_step(step)
            await evaluator.run(step, self._published(step))
        await self._until_step(last)
        await self._actors.learners_done(state.config.learner.step_timeout_s)
        state.end("finished")

    async def _until_step(self, step: int) -> None:
        await self._until(lambda: self.state.flow.window.step >= step, "evaluation", f"step {step}", "the learner")

    def _published(self, step: int) -> PolicyVersion:
        """The newest version that is published by then."""
        newest = self.state.flow.window.rule.start.version
        every = self.state.config.schedule.weight_sync_steps
        return PolicyVersion(self.state.version.incarnation, max(newest, step - step % every))

    async def _watch_over(self) -> None:
        """Ends waits that nothing else would end: lost members, overdue groups, a run that stands still."""
        state = self.state
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = state.clock.monotonic()
            state.reporting.parts.add("event_loop_lag_s", self._lag.take())
            if state.reporting.trouble is not None:
                raise state.reporting.trouble
            self._rollouts.overdue(now_s)
            for member, error in state.members.lost(now_s):
                state.reporting.say(f"{error}; it is ended")
                state.members.leave(member.member_id)
                self._rollouts.lost(member.member_id)
                self._actors.kill(member.member_id)
            still_s = state.stands_still(now_s)
            if still_s is not None:
                waits = "; ".join(f"{w.role} {w.member} waits for {w.waits_for}" for w in state.board.listing())
                raise NoProgressError(f"nothing was sampled, scored or trained for {still_s:.0f} s: {waits}")

    # What the parts tell each other

    def _group_generated(self, group: PromptGroup) -> None:
        self._scoring.submit(group)

    def _groups_ended(self, ended: list[Ended]) -> None:
        for end in ended:
            if end.outcome.dropped is not None:
                self.state.reporting.parts.add(f"groups/dropped_{end.outcome.dropped.value}", 1)
                self.state.train.drop_group(end.outcome.group_id, end.outcome.dropped.value)
                error = self.state.streak.dropped(end.outcome.dropped)
                if error is not None:
                    self.state.end("failed", error)
            self._parts.source.report(end.prompt_id, end.outcome)
        self._rollouts.cancel(ended)
        # Also where none has ended: a group that begins anew waits for a worker again.
        self.state.changed()
        self._rollouts.pump()

    def _checkpoint_state(self, step: int) -> dict[str, object]:
        """The hub's part of a checkpoint."""
        return {
            "version": [self.state.version.incarnation, self.state.version.version],
            "step": step,
            "prompts": self._parts.source.state(),
        }

    async def _until(self, condition: Callable[[], bool], member: str, what: str, whom: str) -> None:
        def holds() -> bool:
            self.state.refuse_if_ended()
            return condition()

        await self.state.changes.wait_until(holds, Wait(role="hub", member=member, waits_for=what, on_whom=whom))
