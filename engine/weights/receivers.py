"""Which version each receiver of weights serves, by its own acknowledgements.

Invariants:

1. A receiver's version moves only on an acknowledgement that it serves the version, with the right digest where that is
   known. A failed update moves nothing.
2. After a failure the receiver gets a full update next, whatever it says it holds. That may lead to an older version
   than it had; otherwise its version never goes back.
3. A receiver that serves a state with a wrong digest is not counted as serving at all.
"""

from dataclasses import dataclass

from headrace.engine.errors import InputError
from headrace.engine.types import AckStatus, PolicyVersion, WeightAck


@dataclass(slots=True)
class _Receiver:
    serving: PolicyVersion | None
    needs_keyframe: bool = False
    failures: int = 0
    message: str = ""


class ReceiverTable:
    """Versions acknowledged by each receiver."""

    def __init__(self) -> None:
        self._receivers: dict[str, _Receiver] = {}

    def register(self, receiver_id: str, serving: PolicyVersion | None) -> None:
        """A receiver joined or came back; what was known about it is forgotten."""
        self._receivers[receiver_id] = _Receiver(serving)

    def remove(self, receiver_id: str) -> None:
        """A receiver left. Harmless if it is unknown."""
        self._receivers.pop(receiver_id, None)

    def acknowledge(self, receiver_id: str, ack: WeightAck, expected_digest: int | None = None) -> bool:
        """Take a receiver's answer to an update.

        Args:
            receiver_id: Registered.
            ack: Its answer; its version is what it serves now, whatever became of the update.
            expected_digest: Of that version, where it is known.

        Returns:
            Whether the receiver now serves `ack.version`. False for a failure, which is then visible in `failure`, and
            for an acknowledgement that a newer one has overtaken.

        Raises:
            InputError: The receiver is not registered.
        """
        receiver = self._find(receiver_id)
        if ack.status is not AckStatus.SERVING:
            self._fail(
                receiver, f"{ack.status.name.lower()}: {ack.message}" if ack.message else ack.status.name.lower()
            )
            return False
        if expected_digest is not None and ack.digest != expected_digest:
            receiver.serving = None
            self._fail(receiver, f"digest {ack.digest:016x} instead of {expected_digest:016x} at version {ack.version}")
            return False
        if not receiver.needs_keyframe and receiver.serving is not None and ack.version < receiver.serving:
            return False
        receiver.serving = ack.version
        receiver.needs_keyframe, receiver.failures, receiver.message = False, 0, ""
        return True

    def serving(self, receiver_id: str) -> PolicyVersion | None:
        """What the receiver serves; None for nothing that may be used."""
        return self._find(receiver_id).serving

    def base_for_update(self, receiver_id: str) -> PolicyVersion | None:
        """What to pass to `VersionChain.what_next`: the version it serves, or None where it needs a full update."""
        receiver = self._find(receiver_id)
        return None if receiver.needs_keyframe else receiver.serving

    def failure(self, receiver_id: str) -> str:
        """Why its last update failed; empty after a success."""
        return self._find(receiver_id).message

    def failures(self, receiver_id: str) -> int:
        """Failed updates in a row."""
        return self._find(receiver_id).failures

    def serving_at_least(self, version: PolicyVersion) -> list[str]:
        """Receivers that serve this version or a newer one, in the order they joined."""
        return [name for name, held in self._receivers.items() if held.serving is not None and held.serving >= version]

    def laggards(self, version: PolicyVersion) -> list[str]:
        """Receivers that serve an older version, or none."""
        return [name for name, held in self._receivers.items() if held.serving is None or held.serving < version]

    def _fail(self, receiver: _Receiver, message: str) -> None:
        receiver.needs_keyframe = True
        receiver.failures += 1
        receiver.message = message

    def _find(self, receiver_id: str) -> _Receiver:
        receiver = self._receivers.get(receiver_id)
        if receiver is None:
            raise InputError(f"receiver {receiver_id!r} is unknown; register it first")
        return receiver
