"""The hub's children: reward, rollout workers, weight agent and learner ranks; who is started, restarted, and when the
run fails.

One-for-one restarts, with a budget, for rollout workers, whose groups begin anew, and for the agent that hands weights
on to them: they subscribe again with what they have. The learner's ranks fall together, and the run with them: it
resumes from its checkpoint. A reward that ends takes the run along too; the pool inside it replaces its own workers.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.engine.config.hardware import count_gpus
from headrace.engine.errors import ActorLostError, HeadraceError, UsageError
from headrace.engine.hub.composition import newest_checkpoint
from headrace.engine.hub.state import HubState
from headrace.engine.scheduling.retry import RestartBudget
from headrace.engine.supervision.child import Child
from headrace.engine.supervision.guardian import Guardian

log = logging.getLogger(__name__)

_AGENT = "agent-0"  # of the hub's own host

_RESTARTS = 5
_RESTART_WINDOW_S = 600.0


class Actors:
    """Spawns the children of a run and watches over them."""

    def __init__(self, state: HubState, hub_address: str, guardian: Guardian, log_folder: Path) -> None:
        self._state = state
        self._hub = hub_address
        self._guardian = guardian
        self._logs = log_folder
        self._children: dict[str, Child] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start_reward(self, address: str) -> None:
        """The reward function in a process of its own."""
        arguments = {"hub": self._hub, "address": address}
        self._watch("reward", self._spawn("reward", "headrace.actors.reward.main:main", arguments))

    def start_rollouts(self) -> None:
        """The rollout workers that the configuration asks for."""
        config = self._state.config
        if config.weights.keyframe_steps > 1:  # whole states need no copy of the one before
            self._start_agent()
        for rank in range(config.rollout.num_workers):
            name = f"rollout-{rank}"
            arguments = {"hub": self._hub, "worker_id": name, "rank": rank}
            self._keep(name, "headrace.actors.rollout.main:main", arguments, config.learner.num_ranks + rank)

    def _start_agent(self) -> None:
        """The agent that the workers of this host get their weights from."""
        state = self._state
        address = f"unix:{state.reporting.folder.socket_path('agent')}"
        state.agent_address = address
        arguments: dict[str, object] = {
            "hub": self._hub,
            "address": address,
            "run_id": state.run_id,
            "agent_id": _AGENT,
            "folder": str(Path(state.payload_dir) / _AGENT),
            "fallback": str(state.reporting.folder.path / "weights" / _AGENT),
        }
        self._keep(_AGENT, "headrace.engine.weights.agent_service:main", arguments)

    def start_learners(self, rendezvous: Path) -> None:
        """The learner's ranks; they meet through a file."""
        num_ranks = self._state.config.learner.num_ranks
        for rank in range(num_ranks):
            name = f"learner-{rank}"
            arguments = {"hub": self._hub, "member_id": name, "rank": rank, "rendezvous": str(rendezvous)}
            self._watch(name, self._spawn(name, "headrace.actors.learner.main:main", arguments, gpu=rank))

    def kill(self, member_id: str) -> None:
        """End a child that is lost; its watcher does the rest."""
        child = self._children.get(member_id)
        if child is not None:
            child.kill()

    async def learners_done(self, grace_s: float) -> None:
        """Wait until every learner rank has ended by itself, or the grace period is over."""
        learners = [child for name, child in self._children.items() if name.startswith("learner-")]
        waits = [asyncio.create_task(child.wait()) for child in learners]
        if waits:
            _, late = await asyncio.wait(waits, timeout=grace_s)
            for task in late:
                task.cancel()

    async def stop(self, grace_s: float) -> None:
        """End all children: learners and rollout workers first, so that the reward answers until the last."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        first = [child for name, child in self._children.items() if name != "reward"]
        await asyncio.gather(*(child.stop(grace_s) for child in first))
        await asyncio.gather(*(child.stop(grace_s) for child in self._children.values()))

    def _spawn(self, name: str, target: str, arguments: Mapping[str, object], gpu: int | None = None) -> Child:
        env = {} if gpu is None else gpu_environment(gpu) | polite_threads(os.environ)
        child = Child.spawn(name, target, arguments, guardian=self._guardian, log_folder=self._logs, env=env)
        self._children[name] = child
        return child

    def _watch(self, name: str, child: Child) -> None:
        async def watch() -> None:
            status = await child.wait()
            if status != 0 or name == "reward":
                error = child.why_it_ended()
                self._state.end("failed", self._with_way_on(error) if name.startswith("learner-") else error)

        task = asyncio.create_task(watch(), name=f"watch {name}")
        self._tasks.add(task)

    def _with_way_on(self, error: HeadraceError) -> HeadraceError:
        """The error of a learner that was killed, with what there is to go on from."""
        if not isinstance(error, ActorLostError):
            return error
        folder = self._state.reporting.folder.path
        checkpoint = newest_checkpoint(folder)
        if checkpoint is None:
            return ActorLostError(
                f"{error}; there is no checkpoint yet (learner.checkpoint_steps = "
                f"{self._state.config.learner.checkpoint_steps}), so start the run anew"
            )
        return ActorLostError(f"{error}; go on from {checkpoint.name} with headrace train --resume {folder}")

    def _keep(self, name: str, target: str, arguments: Mapping[str, object], gpu: int | None = None) -> None:
        self._tasks.add(asyncio.create_task(self._restarting(name, target, arguments, gpu), name=f"keep {name}"))

    async def _restarting(self, name: str, target: str, arguments: Mapping[str, object], gpu: int | None) -> None:
        """Start a child, and again when it dies, within its budget."""
        budget = RestartBudget(_RESTARTS, _RESTART_WINDOW_S)
        while True:
            child = self._spawn(name, target, arguments, gpu=gpu)
            status = await child.wait()
            self._state.members.leave(name)
            if self._state.ended:
                return
            error = child.why_it_ended()
            delay_s = budget.next_delay(self._state.clock.monotonic())
            if status == 0 or isinstance(error, UsageError) or delay_s is None:
                self._state.end("failed", error)
                return
            self._state.reporting.say(f"{name} is started anew in {delay_s:.1f} s: {error}")
            await asyncio.sleep(delay_s)


def gpu_environment(index: int, count: Callable[[], int] | None = None) -> dict[str, str]:
    """Which GPU a child sees: one of its own as long as there are enough, the first otherwise; nothing without GPUs."""
    num_gpus = (count or count_gpus)()
    if num_gpus == 0 or "CUDA_VISIBLE_DEVICES" in os.environ:
        return {}
    return {"CUDA_VISIBLE_DEVICES": str(index if index < num_gpus else 0)}


def polite_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """Let threads that wait for each other sleep, where the user has not said how they wait.

    Sampling and learning share the cores of a small machine; threads that spin at each barrier take from the others
    what those need to get there. Seen on two cores: a step of 28 s instead of 37.
    """
    return {} if "OMP_WAIT_POLICY" in environment else {"OMP_WAIT_POLICY": "PASSIVE"}
