"""What all parts of a hub share: one object, one event loop."""

import logging
from dataclasses import dataclass, field

from headrace.engine.clock import Clock
from headrace.engine.config import Config
from headrace.engine.errors import HeadraceError, StoppedError
from headrace.engine.hub.flow import GroupFlow
from headrace.engine.hub.members import Members
from headrace.engine.hub.ports import TablePort
from headrace.engine.hub.reporting import Reporting
from headrace.engine.hub.streak import FailureStreak
from headrace.engine.hub.waits import Changes, WaitBoard
from headrace.engine.telemetry.events import Ended, RunStatus
from headrace.engine.types import PolicyVersion, PromptGroup

log = logging.getLogger(__name__)

_UNREPORTED_STEPS = 64  # how far a report may lag behind and still give a throughput


@dataclass(slots=True, kw_only=True)
class HubState:
    """The state of a run.

    Attributes:
        version: The version after the last committed step.
        agent_address: Where receivers on this host subscribe to weights; empty where no agent was started.
        fencing_token: Of the current learner; an older one is refused.
        ended: How the run ended; empty while it goes on.
        hold_step: A step that may not begin yet (an evaluation is pinned to the version before it).
        last_progress_s: Monotonic time at which something was sampled, scored or trained.
        loaded_s: Monotonic time at which a member was last seen loading.
        tokens_by_step: Response tokens of the steps that were planned and not reported yet.
        num_updates: Committed steps that were not skipped and had a sample with an advantage.
        num_failed: Attempts of groups that failed so far, in sampling or in scoring.
    """

    run_id: str
    config: Config
    clock: Clock
    board: WaitBoard
    changes: Changes
    flow: GroupFlow
    members: Members
    reporting: Reporting
    streak: FailureStreak
    train: TablePort
    evals: TablePort
    version: PolicyVersion
    fencing_token: int = 1
    resume_from: str = ""
    payload_dir: str = ""
    agent_address: str = ""
    backend: str = ""
    ended: Ended = ""
    error: HeadraceError | None = None
    hold_step: int | None = None
    last_progress_s: float = 0.0
    loaded_s: float = 0.0
    tokens_by_step: dict[int, int] = field(default_factory=dict[int, int])
    num_updates: int = 0
    num_failed: int = 0

    def progressed(self) -> None:
        """Something was sampled, scored or trained."""
        self.last_progress_s = self.clock.monotonic()
        for step in [step for step in self.tokens_by_step if step < self.flow.window.step - _UNREPORTED_STEPS]:
            del self.tokens_by_step[step]  # a trainer of one's own need not report

    def stands_still(self, now_s: float) -> float | None:
        """For how many seconds nothing has been sampled, scored or trained; None while that is within its limit.

        The time in which a member loads does not count against those that load no more; loading has a limit of its own.
        """
        limits = self.config.timeouts
        if any(member.is_loading for member in self.members.all()):
            self.loaded_s = now_s
            still_s, limit_s = now_s - self.last_progress_s, limits.no_progress_s + limits.start_s
        else:
            still_s, limit_s = now_s - max(self.last_progress_s, self.loaded_s), limits.no_progress_s
        return still_s if still_s > limit_s else None

    def attempt_failed(self, group: PromptGroup, why: str) -> None:
        """An attempt at a group failed; people hear of the first, the second, the fourth, ... of them."""
        log.warning("group %s attempt %d: %s", group.group_id, group.attempt, why)
        self.streak.failed(why)
        self.num_failed += 1
        if self.num_failed & (self.num_failed - 1) == 0:
            before = f" ({self.num_failed} failures so far)" if self.num_failed > 1 else ""
            self.reporting.say(f"group {group.group_id} failed{before}: {why}")

    def changed(self) -> None:
        """Let every waiter look again."""
        self.changes.notify()
        self.train.changed()

    def end(self, how: Ended, error: HeadraceError | None = None) -> None:
        """End the run; the first reason counts."""
        if self.ended:
            return
        self.ended, self.error = how, error
        self.reporting.status(self.status())
        self.changed()

    def refuse_if_ended(self) -> None:
        """Raise when the run is ending.

        Raises:
            StoppedError: It is.
        """
        if self.ended:
            raise StoppedError("the run is ending")

    def status(self) -> RunStatus:
        """Where the run stands."""
        return RunStatus(
            step=self.flow.window.step,
            num_steps=self.config.run.steps,
            ended=self.ended,
            error=None if self.error is None else str(self.error),
            model=self.config.model.path,
            backend=self.backend,
            groups_in_flight=self.flow.num_in_flight(),
            groups_ready=self.flow.num_ready(),
        )
