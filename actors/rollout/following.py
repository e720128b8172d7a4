"""A rollout worker follows the weights: at the agent of its host where there is one, else at the hub."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio

from headrace.engine.errors import ActorLostError, DeadlineError, FencedError, StoppedError
from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.control import Joined
from headrace.engine.transport.weight_subscriber import WeightSubscriber
from headrace.engine.types import AckStatus, PolicyVersion, WeightAck, WeightUpdate

log = logging.getLogger(__name__)

Apply = Callable[[WeightUpdate], Awaitable[WeightAck]]

# Between a lost agent and the next try; doubles up to the second.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0


async def follow_weights(
    hub: grpc.aio.Channel,
    run: Joined,
    receiver_id: str,
    have: PolicyVersion,
    apply: Apply,
    *,
    same_host: bool,
    folder: Path,
) -> None:
    """Apply each announced version until the run ends; a refused one is answered, and the old one served on.

    Cancelling ends the subscription.

    Args:
        hub: Channel to the hub.
        run: Names the run and the agent.
        receiver_id: The worker.
        have: What it serves.
        apply: Serves an update or says why not.
        same_host: The hub shares our file system.
        folder: Takes payloads that have to be fetched.

    Raises:
        ActorLostError: The hub is gone. An agent that is gone is waited for.
        WeightUpdateError: Too many updates in a row have failed.
        StorageError: A fetched payload does not fit the disk.
    """
    if not same_host or not run.agent_address:
        subscriber = WeightSubscriber(
            hub, run_id=run.run_id, receiver_id=receiver_id, same_host=same_host, folder=folder
        )
        with contextlib.suppress(StoppedError):
            await _Follower(subscriber, have, apply).follow()
        return
    async with open_channel(run.agent_address) as channel:
        subscriber = WeightSubscriber(
            channel,
            run_id=run.run_id,
            receiver_id=receiver_id,
            same_host=True,
            folder=folder,
            deltas=True,
            patient=True,
        )
        await _Follower(subscriber, have, apply).follow_again()


class _Follower:
    """What the worker has, over one subscription after the other."""

    def __init__(self, subscriber: WeightSubscriber, have: PolicyVersion, apply: Apply) -> None:
        self._subscriber = subscriber
        self._have: PolicyVersion | None = have
        self._apply = apply
        self._wait_s = _FIRST_WAIT_S

    async def follow(self) -> None:
        """Until the stream ends."""
        async with contextlib.aclosing(self._subscriber.updates(self._have)) as updates:
            async for update in updates:
                ack = await self._apply(update)
                # An engine that holds no whole state is served from nothing.
                broken = ack.status is AckStatus.FAILED and not ack.digest
                self._have = None if broken else ack.version
                self._wait_s = _FIRST_WAIT_S
                await self._subscriber.acknowledge(ack)

    async def follow_again(self) -> None:
        """Until the run ends: an agent that is gone is started anew, and knows nothing of us."""
        while True:
            try:
                await self.follow()
            except StoppedError:
                return
            except (ActorLostError, DeadlineError, FencedError) as error:
                log.warning("subscribing to weights again: %s", error)
            await asyncio.sleep(self._wait_s)
            self._wait_s = min(_LONGEST_WAIT_S, 2 * self._wait_s)
