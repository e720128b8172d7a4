"""What the staleness window holds: a group, its stage, and the answers to a request for admission."""

import enum
from dataclasses import dataclass
from typing import Literal

StalePolicy = Literal["wait", "drop"]


class Stage(enum.IntEnum):
    """How far a group in the window has come."""

    QUEUED = 0
    RUNNING = 1
    GENERATED = 2
    READY = 3
    LEASED = 4


class Admission(enum.StrEnum):
    """Whether a group may enter the window now.

    Attributes:
        OK: It may.
        FULL: The window is full; try again after a group has left.
        CROWDED: An external group is due by a step up to which all places are spoken for; newer weights would do.
        STALE: An external group is too old for any step to come.
    """

    OK = "ok"
    FULL = "full"
    CROWDED = "crowded"
    STALE = "stale"


@dataclass(slots=True)
class WindowGroup:
    """A group in the window. `version` is None until it starts; `step` is that of its lease."""

    group_id: str
    sequence: int
    stage: Stage = Stage.QUEUED
    min_version: int = 0
    version: float | None = None
    due: int = 0
    step: int | None = None

    def urgency(self) -> tuple[int, int]:
        """Sorts by expiry, then by admission."""
        return self.due, self.sequence
