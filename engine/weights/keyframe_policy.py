"""When a sender publishes its whole state instead of what changed: a pure state machine.

Invariants:

1. A delta starts from the version that the sender's last accepted update led to, and from no other.
2. Without an accepted update (at the start, and after a refusal) the next one is full.
3. From one accepted keyframe on there are less than `keyframe_steps` deltas, and those that a receiver has to take one
   after the other never weigh more than the keyframe that it could take instead, but for the last of them.
4. After a delta that weighs more than half of its keyframe the next `keyframe_steps - 1` updates are full: where
   almost everything changes (float32 weights, a large learning rate), looking for what did not costs more than it
   saves.
5. What is not settled yet counts for nothing.
"""

from headrace.engine.errors import InputError
from headrace.engine.types import PolicyVersion


class KeyframePolicy:
    """Decides for one sender. Several ranks must agree: where one needs a keyframe, all publish one.

    Args:
        keyframe_steps: Every so many updates are published in full, at least; 1: all of them.
    """

    def __init__(self, keyframe_steps: int) -> None:
        if keyframe_steps < 1:
            raise InputError(f"keyframe_steps = {keyframe_steps} was given; at least 1 is allowed")
        self._keyframe_steps = keyframe_steps
        self._base: PolicyVersion | None = None
        self._keyframe_bytes = 0
        self._delta_bytes = 0
        self._num_deltas = 0
        self._num_full_ahead = 0

    @property
    def base(self) -> PolicyVersion | None:
        """What a delta would start from; None before an update is accepted and after one was refused."""
        return self._base

    @property
    def may_send_delta(self) -> bool:
        """Whether the next update may be a delta, as far as is known now; if not, the state before it is not needed."""
        return self._base is not None and not self._num_full_ahead and self._keyframe_steps > 1

    def needs_keyframe(self, version: PolicyVersion, since: PolicyVersion | None) -> bool:
        """Whether the update to `version` must be full.

        Args:
            version: What is to be published; a delta leads forward, within one incarnation.
            since: The newest version that receivers can build upon, as far as the caller knows.
        """
        base = self._base
        if (
            not self.may_send_delta
            or base is None
            or since != base
            or version.incarnation != base.incarnation
            or version <= base
        ):
            return True
        return self._num_deltas + 1 >= self._keyframe_steps or self._delta_bytes > self._keyframe_bytes

    def accepted(self, version: PolicyVersion, *, full: bool, num_bytes: int) -> None:
        """The update to `version` was taken; `num_bytes` is the size of its payload."""
        self._base = version
        if full:
            self._keyframe_bytes, self._delta_bytes, self._num_deltas = num_bytes, 0, 0
            self._num_full_ahead = max(0, self._num_full_ahead - 1)
            return
        self._delta_bytes += num_bytes
        self._num_deltas += 1
        if 2 * num_bytes > self._keyframe_bytes:
            self._num_full_ahead = self._keyframe_steps - 1

    def refused(self) -> None:
        """An update was not taken, or nobody knows: what receivers have is uncertain."""
        self._base = None
