"""Handing a rank's parts to the hub: where they are written, what the next one starts from, what a refusal leads to.

Invariants:

- A delta is asked for only where the hub took the part before and said that every receiver takes deltas.
- A delta that is refused for its base is replaced by a keyframe of the same version, for receivers may wait for it.
- Whatever else goes wrong, the part counts as refused, and the next one is full.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from headrace.engine.errors import StorageError, WrongBaseError
from headrace.engine.interfaces import StagedUpdate
from headrace.engine.types import PolicyVersion, UpdateKind, WeightUpdate


class PartTaker(Protocol):
    """Where parts go; blocking.

    An attribute `takes_deltas`, where there is one, says whether all receivers take deltas as far as is known.
    """

    def publish(self, part: WeightUpdate) -> bool: ...


class Handover:
    """One rank's parts, one after the other. For one thread at a time.

    Args:
        hub: Takes them.
        payload_dirs: Where payloads go; the next one where there is no room in the first.
        say: A line for people.
    """

    def __init__(self, hub: PartTaker, payload_dirs: Sequence[Path], say: Callable[[str], None]) -> None:
        self._hub = hub
        self._payload_dirs = list(payload_dirs)
        self._say = say
        self._accepted: PolicyVersion | None = None

    @property
    def since(self) -> PolicyVersion | None:
        """What the next update may start from; None asks for a keyframe."""
        return self._accepted if getattr(self._hub, "takes_deltas", False) else None

    def publish(self, staged: StagedUpdate) -> bool:
        """Write a part and offer it; blocks until the hub has it. True when that sealed the version.

        Raises:
            StorageError: There is no room in any folder.
            HeadraceError: What the hub refused it for.
        """
        accepted = False
        try:
            part = self._write(staged, full=False)
            try:
                sealed = self._hub.publish(part)
            except WrongBaseError as error:
                if part.manifest.kind is UpdateKind.KEYFRAME:
                    raise
                self._say(f"version {staged.version} is published in full: {error}")
                sealed = self._hub.publish(self._write(staged, full=True))
            accepted = True
            return sealed
        finally:
            staged.settle(accepted=accepted)
            self._accepted = staged.version if accepted else None

    def _write(self, staged: StagedUpdate, *, full: bool) -> WeightUpdate:
        while True:
            try:
                return staged.write(self._payload_dirs[0], full=full)
            except StorageError as error:
                # A container's shared memory may hold 64 MB. Every rank of the host meets the same wall here.
                if len(self._payload_dirs) == 1:
                    raise
                del self._payload_dirs[0]
                self._payload_dirs[0].mkdir(parents=True, exist_ok=True)
                self._say(f"weights go to {self._payload_dirs[0]} from now on, which is slower: {error}")
