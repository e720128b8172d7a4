"""How receivers follow the weight chain: subscribe, fetch what does not lie on this host, acknowledge."""

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import grpc.aio
import msgspec

from headrace.engine.errors import (
    ActorLostError,
    CorruptUpdateError,
    DeadlineError,
    HeadraceError,
    RunError,
    StoppedError,
    StorageError,
)
from headrace.engine.scheduling.retry import Deadline, RetryPolicy
from headrace.engine.transport.convert import version_to_proto
from headrace.engine.transport.status import error_from_rpc
from headrace.engine.transport.weights import write_at
from headrace.engine.transport.weights_convert import ack_to_proto, update_from_proto
from headrace.engine.types import AckStatus, PolicyVersion, WeightAck, WeightManifest, WeightUpdate
from headrace.engine.weights.bucket_fetch import BucketFetch
from headrace.engine.weights.placement import open_reserved
from headrace.v1 import weights_pb2 as pb
from headrace.v1 import weights_pb2_grpc

_FETCH_TIMEOUT_S = 600.0
_ACK_TIMEOUT_S = 30.0

# Of fetches that bring nothing new.
_RETRIES = RetryPolicy(retries=5, base_s=0.1, max_s=2.0)


class WeightSubscriber:
    """A receiver's line to the weight chain: to the hub, or to the agent of its host.

    Announcements skip versions that a lagging receiver has missed: what comes next leads as far as it can.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        run_id: str,
        receiver_id: str,
        same_host: bool,
        folder: Path,
        deltas: bool = False,
        agent: bool = False,
        patient: bool = False,
    ) -> None:
        """Prepare.

        Args:
            channel: To the hub or the agent.
            run_id: Of the run.
            receiver_id: Unique within the run; a second subscription of the same name takes over.
            same_host: The other side shares our file system.
            folder: Takes payloads that have to be fetched, one at a time.
            deltas: Take deltas too. The hub's are encoded for a receiver that keeps the base; an agent's are change
                files.
            agent: We are one.
            patient: Wait until the other side is reachable, instead of failing.
        """
        self._stub: weights_pb2_grpc.WeightServiceAsyncStub = weights_pb2_grpc.WeightServiceStub(channel)
        self._run_id = run_id
        self._receiver_id = receiver_id
        self._same_host = same_host
        self._folder = folder
        self._deltas = deltas
        self._agent = agent
        self._patient = patient
        self._rng = random.Random()
        self._serving = PolicyVersion(0, 0)
        self._fetch_s = 0.0

    async def updates(self, have: PolicyVersion | None) -> AsyncGenerator[WeightUpdate, None]:
        """Updates to apply, one at a time, each with its payload in a file of this host. Waits for the next.

        An update whose payload does not arrive is answered for, and what comes instead is waited for.

        Raises:
            ActorLostError: The other side is gone.
            StorageError: A fetched payload does not fit the disk.
            StoppedError: The run is ending.
            WeightUpdateError: We have failed too often.
        """
        request = pb.SubscribeRequest(
            run_id=self._run_id,
            receiver_id=self._receiver_id,
            have=None if have is None else version_to_proto(have),
            same_host=self._same_host,
            deltas=self._deltas,
            agent=self._agent,
        )
        self._serving = have or self._serving
        call = self._stub.Subscribe(request, wait_for_ready=self._patient)
        try:
            async for message in call:
                update = update_from_proto(message.update)
                self._fetch_s = 0.0
                if not update.local_path:
                    fetched = await self._fetched_or_refused(update.manifest)
                    if fetched is None:
                        continue
                    update = fetched
                yield update
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, "waiting for weight updates") from error
        finally:
            call.cancel()

    async def acknowledge(self, ack: WeightAck) -> None:
        """Say what became of the last update.

        Raises:
            ActorLostError: The other side is gone.
        """
        self._serving = ack.version
        await self._acknowledge(self._receiver_id, msgspec.structs.replace(ack, fetch_s=self._fetch_s))

    async def hand_on(self, receiver_id: str, ack: WeightAck) -> None:
        """For an agent: tell the hub what a receiver of this host has answered.

        Raises:
            ActorLostError: The hub is gone.
        """
        await self._acknowledge(receiver_id, ack, agent_id=self._receiver_id)

    async def report_waits(self, receiver_ids: Sequence[str]) -> None:
        """For an agent: tell the hub which receivers of this host wait for a newer version.

        Raises:
            ActorLostError: The hub is gone.
        """
        request = pb.ReportWaitsRequest(run_id=self._run_id, agent_id=self._receiver_id, receiver_ids=receiver_ids)
        try:
            await self._stub.ReportWaits(request, timeout=_ACK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, "telling the hub who waits for weights") from error

    async def _acknowledge(self, receiver_id: str, ack: WeightAck, agent_id: str = "") -> None:
        request = pb.AcknowledgeRequest(
            run_id=self._run_id, receiver_id=receiver_id, ack=ack_to_proto(ack), agent_id=agent_id
        )
        try:
            await self._stub.Acknowledge(request, timeout=_ACK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, "acknowledging weights") from error

    async def _fetched_or_refused(self, manifest: WeightManifest) -> WeightUpdate | None:
        begun_s = time.monotonic()
        try:
            return await self._fetch(manifest)
        except (StorageError, StoppedError):
            raise
        except RunError as error:
            await self.acknowledge(WeightAck(version=self._serving, status=AckStatus.CORRUPT, message=str(error)))
            return None
        finally:
            self._fetch_s = time.monotonic() - begun_s

    async def _fetch(self, manifest: WeightManifest) -> WeightUpdate:
        """Stream the payload into a file of our own; after a break only what has not arrived is asked for."""
        fetch = BucketFetch(manifest)
        path = self._folder / f"fetched-{manifest.version.incarnation}-{manifest.version.version}.bin"
        for old in self._folder.glob("fetched-*.bin"):
            old.unlink()
        descriptor = open_reserved(path, manifest.payload_bytes)
        failures = 0
        try:
            while missing := fetch.missing():
                error = await self._fetch_some(manifest, missing, fetch, descriptor, path)
                left = len(fetch.missing())
                if not left:
                    break
                failures = 0 if left < len(missing) else failures + 1
                delay_s = _RETRIES.next_delay(failures, self._rng, time.monotonic(), Deadline())
                if delay_s is None:
                    raise error or CorruptUpdateError(
                        f"{left} buckets of weights {manifest.version} do not arrive unharmed; the update is refused"
                    )
                await asyncio.sleep(delay_s)
        finally:
            os.close(descriptor)
        return WeightUpdate(manifest=manifest, local_path=str(path))

    async def _fetch_some(
        self, manifest: WeightManifest, missing: Sequence[int], fetch: BucketFetch, descriptor: int, path: Path
    ) -> HeadraceError | None:
        """Ask once for what is missing; returns why the stream broke, where trying again may help."""
        request = pb.FetchRequest(
            run_id=self._run_id,
            version=version_to_proto(manifest.version),
            base=None if manifest.base is None else version_to_proto(manifest.base),
            bucket_indices=missing,
        )
        call = self._stub.Fetch(request, timeout=_FETCH_TIMEOUT_S)
        try:
            async for message in call:
                if fetch.take(message.bucket_index, message.offset, message.data):
                    await asyncio.to_thread(write_at, descriptor, message.data, message.offset, path)
        except grpc.aio.AioRpcError as error:
            found = error_from_rpc(error, f"fetching weights {manifest.version}")
            if not isinstance(found, (ActorLostError, DeadlineError)):
                raise found from error
            return found
        finally:
            call.cancel()
        return None
