"""The agent of a host: takes each update once, and hands it on to all receivers of the host.

    consumes    sealed updates from the hub, as one of its receivers; answers of the receivers of this host
    produces    for each of them the way to the newest version, as a file of this host
    waits for   the hub's next update; a receiver's answer

Invariants:
- One thread owns the copy and the files; versions are counted on the event loop, after that thread is done. So what is
  read from the log for a file belongs to the version of the copy, and a file for another version is not made.
- What a receiver was offered stays until it has answered or its stream has ended.
- An agent that dies loses nothing: its successor begins with nothing, and receivers subscribe with what they have.
"""

import asyncio
import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.engine.clock import Clock, SystemClock
from headrace.engine.errors import (
    ActorLostError,
    CorruptUpdateError,
    DeadlineError,
    FencedError,
    HeadraceError,
    StoppedError,
    WeightUpdateError,
    WrongBaseError,
)
from headrace.engine.transport.weight_subscriber import WeightSubscriber
from headrace.engine.types import AckStatus, PolicyVersion, WeightAck, WeightUpdate
from headrace.engine.weights.change_log import PackedStep, pack_step
from headrace.engine.weights.host_files import HostFiles
from headrace.engine.weights.host_offers import HostOffers, Stream

log = logging.getLogger(__name__)

_MAX_FAILURES = 3  # in a row; then the receiver's process is better started anew
_AUDIT_EVERY = 25  # updates; the digest of the copy is computed anew from all its bytes

_Answer = TypeVar("_Answer")


class WeightAgent:
    """One host's receivers of weights, and the copy that they are served from. For one event loop."""

    def __init__(
        self,
        subscriber: WeightSubscriber,
        folder: Path,
        run_id: str,
        *,
        fallback: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Prepare.

        Args:
            subscriber: Our own line to the hub; it takes deltas.
            folder: Ours alone; what is there is removed.
            run_id: Receivers of another run are refused.
            fallback: Takes what finds no room in `folder`; ours alone, too.
            clock: Times the application of updates.
        """
        self.run_id = run_id
        self._subscriber = subscriber
        self._files = HostFiles(folder, run_id, fallback)
        self._offers = HostOffers()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._clock = clock or SystemClock()
        self._changed = asyncio.Event()
        self._taking = asyncio.Lock()  # from an update's arrival to its answer
        self._num_taken = 0
        self._end: HeadraceError | None = None

    @property
    def version(self) -> PolicyVersion | None:
        """What the host has; None for nothing that may be served."""
        return self._offers.version

    async def follow(self) -> None:
        """Take updates until the run ends; then every stream ends, too. On cancelling and errors they end as well, with
        the word to subscribe again.

        Raises:
            ActorLostError: The hub is gone.
            StorageError: There is no room for the copy.
            WeightUpdateError: Too many updates in a row were damaged.
        """
        telling = asyncio.create_task(self._tell_waits(), name="who waits")
        try:
            async for update in self._subscriber.updates(None):
                async with self._taking:
                    await self._subscriber.acknowledge(await self._take(update))
        except StoppedError as error:
            self._end = error
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            self._end = self._end or ActorLostError("the agent of this host is ending; subscribe again")
            self._notify()

    def subscribe(self, receiver: str, have: PolicyVersion | None, *, deltas: bool) -> Stream:
        """A receiver of this host asks for updates; end it with `leave`."""
        stream = self._offers.subscribe(receiver, have, deltas)
        self._notify()
        return stream

    async def leave(self, stream: Stream) -> None:
        """The stream ended; what it was offered may go."""
        self._offers.leave(stream)
        self._notify()
        await self._sweep()

    async def next_update(self, stream: Stream) -> WeightUpdate:
        """Wait for the next update of a receiver. Cancelling leaves the stream usable for `leave` only.

        Raises:
            StoppedError: The run is ending.
            ActorLostError: The agent alone is.
            FencedError: The receiver has subscribed again.
            WeightUpdateError: It has failed too often.
            StorageError: There is no room for the file.
        """
        while True:
            offer = self._offers.next_for(stream)
            self._refuse(stream)
            if offer is None:
                await self._changed.wait()
                continue
            self._offers.offer(stream, offer)
            self._notify()
            try:
                update = await self._in_thread(functools.partial(self._files.make, offer, self._offers.since))
            except CorruptUpdateError as error:
                self._offers.withdraw(stream)
                await self._resync(error)
                continue
            if update is not None:
                return update
            self._offers.withdraw(stream)  # overtaken by a newer version

    async def acknowledge(self, receiver: str, ack: WeightAck) -> None:
        """Take a receiver's answer, and hand it on to the hub.

        Raises:
            FencedError: The receiver has no stream here, as after this agent was started anew.
        """
        if not self._offers.knows(receiver):
            raise FencedError(f"receiver {receiver!r} has no subscription at this agent; subscribe again")
        if not self._offers.acknowledge(receiver, ack) and ack.status is AckStatus.SERVING:
            why = self._offers.failure(receiver)
            if why:
                ack = msgspec.structs.replace(ack, status=AckStatus.CORRUPT, message=why)
        self._notify()
        await self._sweep()
        try:
            await self._subscriber.hand_on(receiver, ack)
        except (ActorLostError, DeadlineError) as error:
            log.warning("the answer of %s did not reach the hub: %s", receiver, error)

    def close(self) -> None:
        """Remove the copy and all files; blocks until the thread is done. May be called twice."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._files.close()

    # Our own copy

    async def _take(self, update: WeightUpdate) -> WeightAck:
        """Move the copy, or say why not."""
        begin_s = self._clock.monotonic()
        manifest = update.manifest
        try:
            changed = await self._in_thread(lambda: self._apply(update))
            self._num_taken += 1
            if self._num_taken % _AUDIT_EVERY == 0:
                await self._in_thread(self._files.shadow.audit)
        except (WrongBaseError, CorruptUpdateError) as error:
            log.warning("weights %s were not taken: %s", manifest.version, error)
            has = self._files.shadow.version
            if has is None:
                self._offers.lost()
            status = AckStatus.WRONG_BASE if isinstance(error, WrongBaseError) else AckStatus.CORRUPT
            return WeightAck(version=has or PolicyVersion(0, 0), status=status, message=str(error))
        self._offers.moved(manifest.version, manifest.digest, changed, self._files.shadow.num_bytes)
        self._notify()
        await self._sweep()
        return WeightAck(
            version=manifest.version,
            status=AckStatus.SERVING,
            digest=manifest.digest,
            apply_s=self._clock.monotonic() - begin_s,
        )

    def _apply(self, update: WeightUpdate) -> PackedStep | None:
        touched = self._files.apply(update)
        return None if touched is None else pack_step(touched)

    async def _resync(self, error: CorruptUpdateError) -> None:
        """The copy turned out to be damaged: ask the hub for a whole state, unless one has come meanwhile."""
        log.error("%s", error)
        self._offers.lost()
        async with self._taking:
            if self._files.shadow.version is None:
                ack = WeightAck(version=PolicyVersion(0, 0), status=AckStatus.WRONG_BASE, message=str(error))
                await self._subscriber.acknowledge(ack)

    async def _tell_waits(self) -> None:
        """Keep the hub informed of who waits, so that people who ask it get an answer."""
        told: list[str] = []
        while True:
            changed, waiting = self._changed, self._offers.waiting()
            if waiting != told:
                try:
                    await self._subscriber.report_waits(waiting)
                    told = waiting
                except HeadraceError as error:  # tried again with the next change
                    log.warning("%s", error)
            await changed.wait()

    async def _sweep(self) -> None:
        needed = self._offers.needed()
        await self._in_thread(lambda: self._files.sweep(needed))

    async def _in_thread(self, act: Callable[[], _Answer]) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(self._pool, act)

    def _refuse(self, stream: Stream) -> None:
        if self._end is not None:
            raise self._end
        if not self._offers.is_current(stream):
            raise FencedError(f"receiver {stream.receiver!r} has subscribed again; this stream is over")
        if self._offers.failures(stream.receiver) >= _MAX_FAILURES:
            raise WeightUpdateError(
                f"{stream.receiver} has failed {_MAX_FAILURES} updates in a row: "
                f"{self._offers.failure(stream.receiver)}"
            )

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
