"""A learner rank's line to the hub: everything that its loop says, over three services of one address."""

from collections.abc import Sequence

from headrace.engine.transport.buffer_take import BlockingBufferClient, TakenBatch
from headrace.engine.transport.channel import open_blocking_channel
from headrace.engine.transport.control import BlockingControlClient, Joined, Span
from headrace.engine.transport.weights import WeightPublisher
from headrace.engine.types import PolicyVersion, WeightUpdate

CONSUMER = "learner"
# A hub does not come back within a run, so its ranks must not outlive it; a network does.
_OUTAGE_S = {True: 1.0, False: 60.0}


class LearnerClient:
    """Everything that a rank says to the hub once it has joined. Blocking; for one thread."""

    def __init__(
        self,
        hub: str,
        control: BlockingControlClient,
        run: Joined,
        rank: int,
        num_ranks: int,
        *,
        sharing_hidden_size: int = 0,
    ) -> None:
        """Open the channels; `control` has joined and stays the caller's. See `BlockingBufferClient` for the last."""
        self._control = control
        self._channel = open_blocking_channel(hub)
        self._buffer = BlockingBufferClient(
            self._channel,
            table="train",
            consumer_id=CONSUMER,
            incarnation=run.incarnation,
            rank=rank,
            num_ranks=num_ranks,
            sharing_hidden_size=sharing_hidden_size,
            outage_s=_OUTAGE_S[hub.startswith("unix:")],
        )
        self._weights = WeightPublisher(hub, rank=rank, num_ranks=num_ranks, fencing_token=run.fencing_token)

    def take(self, step: int, deadline_s: float) -> TakenBatch:
        """Lease the batch of a step; see `BlockingBufferClient.take`."""
        return self._buffer.take(step, deadline_s)

    def commit(self, step: int, lease_token: int, skipped: bool = False) -> PolicyVersion:
        """Consume the batch of a step; see `BlockingBufferClient.commit`."""
        return self._buffer.commit(step, lease_token, skipped)

    def publish(self, part: WeightUpdate) -> bool:
        """Offer this rank's part of a version; see `WeightPublisher.publish`. May be called in another thread."""
        return self._weights.publish(part)

    @property
    def takes_deltas(self) -> bool:
        """See `WeightPublisher.takes_deltas`."""
        return self._weights.takes_deltas

    def report(self, step: int, spans: Sequence[Span], metrics: dict[str, float]) -> None:
        """Finish the row of a step in metrics.jsonl; `step` counts finished steps."""
        self._control.report(step=step, spans=spans, metrics=metrics)

    def doing(self, what: str) -> None:
        """What the rank does from now on; shown to people, and taken as progress."""
        self._control.progress.moved(what)

    def say(self, text: str) -> None:
        """A line for people."""
        self._control.progress.say(text)

    def close(self) -> None:
        """Close the channels. May be called twice."""
        self._channel.close()
        self._weights.close()
