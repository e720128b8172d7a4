"""What a host's agent offers to each receiver of its host: a pure state machine.

Invariants:

1. A receiver has one offer at a time; the next is worked out from what it has acknowledged.
2. An offer leads to the newest version that the host has, in one go: from the receiver's version where all that changed
   since is still known, else as the whole state. So a receiver that lags never has a queue.
3. Nothing leads backwards, within an incarnation or from one to an older one: an agent that was started anew and is
   behind offers nothing until it has caught up.
4. After a failure, and after a digest that is not the version's, a receiver is offered the whole state. One that takes
   no deltas, or has shown that it cannot, is offered nothing else.
5. While the host's copy is lost, nothing is offered.
6. A receiver has one stream; a second one of the same name takes over, and what becomes of the first changes nothing.

Owns no file, socket or clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.engine.types import AckStatus, PolicyVersion, WeightAck
from headrace.engine.weights.change_log import ChangeLog, PackedStep, Touched
from headrace.engine.weights.receivers import ReceiverTable

# Deltas that a receiver may refuse in a row before it is offered no more of them.
_MAX_REFUSED = 3

# What the log may hold: this, or a share of the state where that is more.
_MIN_LOG_BYTES = 1 << 20
_LOG_SHARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An update to `version`, from `base` or (None) from nothing."""

    version: PolicyVersion
    base: PolicyVersion | None


@dataclass(slots=True, eq=False)
class Stream:
    """A receiver's subscription.

    Attributes:
        deltas: It takes deltas, as far as it is known.
        offer: What is out; None after its answer.
        num_refused: Deltas that it has refused since it last took one.
    """

    receiver: str
    deltas: bool
    offer: Offer | None = None
    num_refused: int = 0


class HostOffers:
    """The receivers of a host, and what is known of the versions that the host has had."""

    def __init__(self) -> None:
        self._log = ChangeLog(_MIN_LOG_BYTES)
        self._receivers = ReceiverTable()
        self._streams: dict[str, Stream] = {}
        self._lost = True

    @property
    def version(self) -> PolicyVersion | None:
        """What the host has; None for nothing that may be offered."""
        return None if self._lost else self._log.newest

    # The host's copy

    def moved(
        self, version: PolicyVersion, digest: int, touched: Sequence[Touched] | PackedStep | None, state_bytes: int
    ) -> None:
        """The copy has moved to `version`.

        Args:
            version: What it is now.
            digest: Of it.
            touched: What changed from the version before; None where nobody can say.
            state_bytes: Size of the copy, by which the log is bounded.
        """
        self._log.limit_bytes = max(_MIN_LOG_BYTES, state_bytes // _LOG_SHARE)
        before = self.version
        self._lost = False
        if touched is None or before is None or version <= before or version.incarnation != before.incarnation:
            self._log.begin(version, digest)
        else:
            self._log.record(version, digest, touched)

    def lost(self) -> None:
        """The copy is damaged; a whole state has to come."""
        self._lost = True

    def since(self, base: PolicyVersion) -> Iterator[Touched]:
        """What changed from `base` to the version that the host has. Read before `moved` is called again."""
        return self._log.since(base)

    # Receivers

    def subscribe(self, receiver: str, have: PolicyVersion | None, deltas: bool) -> Stream:
        """A receiver asks for updates, for the first time or anew; what it was offered before is void."""
        self._receivers.register(receiver, have)
        stream = self._streams[receiver] = Stream(receiver, deltas)
        return stream

    def is_current(self, stream: Stream) -> bool:
        """Whether the receiver has not subscribed again since."""
        return self._streams.get(stream.receiver) is stream

    def leave(self, stream: Stream) -> None:
        """A stream ended."""
        if self.is_current(stream):
            del self._streams[stream.receiver]
            self._receivers.remove(stream.receiver)

    def next_for(self, stream: Stream) -> Offer | None:
        """What to offer on this stream now, if anything; `offer` takes note of it."""
        version = self.version
        if version is None or stream.offer is not None or not self.is_current(stream):
            return None
        serving = self._receivers.serving(stream.receiver)
        if serving is not None and version < serving:
            return None
        base = self._receivers.base_for_update(stream.receiver)
        if base == version:
            return None
        known = stream.deltas and base is not None and self._log.knows(base)
        return Offer(version=version, base=base if known else None)

    def offer(self, stream: Stream, offer: Offer) -> None:
        """It is made; the next waits for the answer."""
        stream.offer = offer

    def withdraw(self, stream: Stream) -> None:
        """It could not be made after all."""
        stream.offer = None

    def acknowledge(self, receiver: str, ack: WeightAck) -> bool:
        """Take a receiver's answer; whether it serves `ack.version` now.

        Raises:
            InputError: The receiver has no stream here.
        """
        moved = self._receivers.acknowledge(receiver, ack, self._log.digest_of(ack.version))
        stream = self._streams[receiver]
        if stream.offer is not None and stream.offer.base is not None:
            stream.num_refused = 0 if moved else stream.num_refused + 1
            if ack.status is AckStatus.UNKNOWN_LAYOUT or stream.num_refused >= _MAX_REFUSED:
                stream.deltas = False
        stream.offer = None
        return moved

    def knows(self, receiver: str) -> bool:
        """Whether the receiver has a stream here."""
        return receiver in self._streams

    def failures(self, receiver: str) -> int:
        """Failed updates in a row."""
        return self._receivers.failures(receiver)

    def failure(self, receiver: str) -> str:
        """Why its last update failed."""
        return self._receivers.failure(receiver)

    def waiting(self) -> list[str]:
        """Receivers that have answered and have nothing to do until the host gets a newer version."""
        return sorted(
            stream.receiver
            for stream in self._streams.values()
            if stream.offer is None and self.next_for(stream) is None
        )

    def needed(self) -> set[Offer]:
        """Offers that are out, whose files have to stay."""
        return {stream.offer for stream in self._streams.values() if stream.offer is not None}
