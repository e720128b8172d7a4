"""What a run tells those who watch it.

Events are facts, not requests: a watcher that is slow or gone changes nothing in the run. They carry JSON types
only, so that they can cross a process border.
"""

from collections.abc import AsyncIterator
from typing import Literal, Protocol

import msgspec

# How a run ended; empty while it runs.
Ended = Literal["", "finished", "stopped", "failed"]


class MetricsRow(msgspec.Struct, frozen=True, kw_only=True, tag="metrics"):
    """The figures of one step, or of one evaluation.

    Attributes:
        step: Steps finished so far; an evaluation before the first step has 0.
        values: Keys of docs/metrics.md; a figure that is not known is absent or None.
    """

    step: int
    values: dict[str, float | None]


class Activity(msgspec.Struct, frozen=True, kw_only=True, tag="activity"):
    """What one member of a role does from now on.

    Attributes:
        role: "learner", "rollout", "reward", "weights" or "hub".
        member: Which of the role's members, from 0.
        doing: A short phrase such as "step 4" or "waiting for 2 groups"; empty when the member has left.
        since_s: Unix time at which it began.
    """

    role: str
    member: int
    doing: str
    since_s: float


class LogLine(msgspec.Struct, frozen=True, kw_only=True, tag="log"):
    """One line for people, such as "engine vllm ready in 24 s"."""

    text: str


class RunStatus(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """Where the run stands.

    Attributes:
        step: Steps finished.
        num_steps: Steps asked for.
        ended: Empty while the run goes on.
        error: One sentence, with `ended == "failed"`.
        model: Name of the trained model; empty when not known yet.
        backend: Name of the inference backend; empty when not known yet.
        groups_in_flight: Groups that are being sampled or scored now, or None when not known.
        groups_ready: Groups that wait to be trained on, or None when not known.
    """

    step: int
    num_steps: int
    ended: Ended = ""
    error: str | None = None
    model: str = ""
    backend: str = ""
    groups_in_flight: int | None = None
    groups_ready: int | None = None


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended.

    Attributes:
        steps: Steps finished, those of earlier incarnations included.
        ended: Never empty.
        error: One sentence, with `ended == "failed"`.
    """

    steps: int
    ended: Ended
    error: str | None = None


RunEvent = MetricsRow | Activity | LogLine | RunStatus


class RunEvents(Protocol):
    """A run that can be watched."""

    def events(self) -> AsyncIterator[RunEvent]:
        """All events from now on, in order; ends after the status that says how the run ended.

        Waits for the next event. Closing the iterator, or cancelling the task that reads it, ends the watching and
        leaves the run alone.
        """
        ...
