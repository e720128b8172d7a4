"""The hub's WeightService: learner ranks publish parts, receivers are told of sealed versions and acknowledge them.

    consumes    parts from learner ranks, acknowledgements from receivers
    produces    sealed updates, one at a time for each receiver
    waits for   a newer version; a receiver's acknowledgement

Invariants:
- Nothing of a version is announced before it is sealed.
- A receiver has one update at a time; the next is worked out from what it has acknowledged.
- What is refused leaves no trace: a file that came with it is forgotten, and removed if it was written here.
- Payload files are removed that no retained update needs and no receiver was offered that has not answered yet; a
  receiver that has one mapped keeps its bytes.
- A receiver that takes no deltas is sent keyframes alone, and publishers hear that they have to send them.
- A receiver has one stream; a second one of the same name takes over, and what becomes of the first changes nothing.
- Weights that did not change although they were trained are told of: without a word of it, rollouts would come from one
  policy for the whole run and look like growing staleness.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio

from headrace.engine.errors import CorruptUpdateError, FencedError, HeadraceError, UsageError, WeightUpdateError
from headrace.engine.hub.state import HubState
from headrace.engine.hub.waits import Wait
from headrace.engine.hub.weight_answers import report_answer
from headrace.engine.hub.weight_files import PartFile, UpdateFiles, form_of
from headrace.engine.hub.weight_waits import AgentWaits
from headrace.engine.transport.channel import FRAME_BYTES
from headrace.engine.transport.convert import version_from_proto
from headrace.engine.transport.weights import write_at
from headrace.engine.transport.weights_convert import ack_from_proto, manifest_from_proto, update_to_proto
from headrace.engine.types import AckStatus, PolicyVersion, UpdateKind, WeightManifest, WeightUpdate
from headrace.engine.weights.chain import VersionChain
from headrace.engine.weights.layout import num_elements
from headrace.engine.weights.placement import open_reserved
from headrace.engine.weights.receivers import ReceiverTable
from headrace.v1 import weights_pb2 as pb
from headrace.v1 import weights_pb2_grpc

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[object, object]

log = logging.getLogger(__name__)

_RETAINED = 2  # full updates; a slow receiver skips to the newest
_MAX_FAILURES = 3  # in a row; then the receiver's process is better started anew


@dataclass(slots=True, eq=False)
class _Stream:
    """A receiver's subscription; an agent's serves the receivers of its host."""

    deltas: bool
    agent: bool


class WeightHub(weights_pb2_grpc.WeightServiceServicer):
    """Serves the version chain of a run."""

    def __init__(self, state: HubState, folder: Path) -> None:
        self._state = state
        self._files = UpdateFiles(folder)
        self._sealing = asyncio.Lock()
        self._chain = VersionChain(
            state.run_id,
            state.config.learner.num_ranks,
            keep=_RETAINED,
            root=None if state.resume_from else state.version,
        )
        self._receivers = ReceiverTable()
        self._offered: dict[str, WeightManifest] = {}
        self._streams: dict[str, _Stream] = {}  # the one of each receiver that counts
        self._agent_waits = AgentWaits(state.board)
        # Version, digest and number of updates when the last version was sealed.
        self._last: tuple[PolicyVersion | None, int, int] = (None, 0, 0)
        self._num_frozen = 0

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest sealed version, or the base that engines load by themselves."""
        return self._chain.newest

    # Publishing

    async def Publish(
        self, request_iterator: AsyncIterator[pb.PublishRequest], context: "Context"
    ) -> pb.PublishResponse:
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None or first.WhichOneof("part") != "header":
            raise UsageError("a Publish stream begins with its header")
        header = first.header
        if header.fencing_token < self._state.fencing_token:
            raise FencedError(
                f"token {header.fencing_token} has been taken over by {self._state.fencing_token}; stop this learner"
            )
        manifest = manifest_from_proto(header.manifest)
        if self._chain.is_sealed(manifest):  # offered again; its file is not touched any more
            known = self._chain.offer_part(header.rank, manifest, header.fencing_token)
            assert known is not None
            return pb.PublishResponse(sealed=True, digest=known.digest, deltas=self._all_take_deltas())
        path = Path(header.local_path)
        if not header.local_path:
            path = self._files.place(form_of(manifest), header.rank)
            await self._receive(path, manifest, requests)
        part = PartFile(
            path=path,
            num_bytes=manifest.payload_bytes,
            num_changed=header.num_changed,
            encode_s=header.encode_s,
        )
        async with self._sealing:
            sealed = await self._offer(header.rank, manifest, header.fencing_token, part)
        if sealed is None:
            return pb.PublishResponse(sealed=False, digest=manifest.digest, deltas=self._all_take_deltas())
        self._remove_unneeded()
        self._tell_if_frozen(sealed)
        self._report(sealed)
        self._state.changed()
        return pb.PublishResponse(sealed=True, digest=sealed.digest, deltas=self._all_take_deltas())

    async def _offer(self, rank: int, manifest: WeightManifest, token: int, part: PartFile) -> WeightManifest | None:
        """Give a part to the chain. The payload is one file before the chain can seal it, so none is ever without."""
        if self._chain.is_sealed(manifest):
            return self._chain.offer_part(rank, manifest, token)
        form = form_of(manifest)
        self._files.add(form, rank, part)
        try:
            if self._chain.would_seal(rank, manifest, token):
                await asyncio.to_thread(self._files.join, form)
            return self._chain.offer_part(rank, manifest, token)
        except HeadraceError:
            self._files.refuse(form, rank)
            raise

    def _report(self, sealed: WeightManifest) -> None:
        parts = self._files.parts(form_of(sealed))
        add = self._state.reporting.parts.add
        add("weights/wire_bytes", sealed.payload_bytes)
        if sealed.kind is UpdateKind.DELTA:
            changed = sum(part.num_changed for part in parts)
            add("weights/density", changed / max(1, sum(map(num_elements, sealed.tensors))))
            add("weights/encode_s", max(part.encode_s for part in parts))

    async def _receive(self, path: Path, manifest: WeightManifest, requests: AsyncIterator[pb.PublishRequest]) -> None:
        """Write streamed pieces to their places; several ranks may do so at the same time."""
        descriptor = open_reserved(path, manifest.payload_bytes)
        missing = sum(bucket.payload_bytes for bucket in manifest.buckets)
        try:
            async for request in requests:
                chunk = request.chunk
                missing -= len(chunk.data)
                if chunk.offset + len(chunk.data) > manifest.payload_bytes:
                    raise CorruptUpdateError(
                        f"a piece of version {manifest.version} ends at byte {chunk.offset + len(chunk.data)} of "
                        f"{manifest.payload_bytes}"
                    )
                await asyncio.to_thread(write_at, descriptor, chunk.data, chunk.offset, path)
        finally:
            os.close(descriptor)
        if missing:
            raise CorruptUpdateError(
                f"version {manifest.version} came with {abs(missing)} bytes too {'few' if missing > 0 else 'many'}"
            )

    def _tell_if_frozen(self, sealed: WeightManifest) -> None:
        """Say so where the weights are bit for bit those of the version before, with an update in between."""
        state = self._state
        version, digest, updates = self._last
        if sealed.version == version:
            return
        self._last = (sealed.version, sealed.digest, state.num_updates)
        if sealed.digest != digest or state.num_updates == updates:
            return
        self._num_frozen += 1
        if self._num_frozen & (self._num_frozen - 1) == 0:  # the first, the second, the fourth, ...
            state.reporting.say(
                f"the weights of version {sealed.version} are bit for bit those of {version}, although "
                f"{state.num_updates - updates} updates were made in between ({self._num_frozen} such versions so far):"
                " look at learner.learning_rate and model.dtype, and at what the trainer exports"
            )

    def _remove_unneeded(self) -> None:
        newest = self._chain.newest
        if newest is not None:
            needed = {form_of(manifest) for manifest in (*self._chain.retained(), *self._offered.values())}
            self._files.remove_before(newest, needed)

    def _all_take_deltas(self) -> bool:
        """Without a receiver nobody is known to take them, and one that comes later may not."""
        return bool(self._streams) and all(stream.deltas for stream in self._streams.values())

    # Receiving

    async def Subscribe(self, request: pb.SubscribeRequest, context: "Context") -> AsyncIterator[pb.SubscribeResponse]:
        if request.run_id != self._state.run_id:
            raise UsageError(
                f"receiver {request.receiver_id!r} asks for run {request.run_id!r}, this is {self._state.run_id!r}"
            )
        receiver = request.receiver_id
        self._receivers.register(receiver, version_from_proto(request.have) if request.HasField("have") else None)
        self._offered.pop(receiver, None)
        mine = self._streams[receiver] = _Stream(request.deltas, request.agent)
        self._state.changed()
        try:
            while True:
                await self._until_there_is_more(receiver, mine)
                manifest = self._next_for(receiver)
                assert manifest is not None
                self._offered[receiver] = manifest
                path = str(self._files.path(form_of(manifest))) if request.same_host else ""
                yield pb.SubscribeResponse(update=update_to_proto(WeightUpdate(manifest=manifest, local_path=path)))
        finally:
            if self._streams.get(receiver) is mine:
                self._agent_waits.set(receiver, ())
                del self._streams[receiver]
                self._offered.pop(receiver, None)
                self._receivers.remove(receiver)

    async def _until_there_is_more(self, receiver: str, stream: _Stream) -> None:
        def is_more() -> bool:
            self._state.refuse_if_ended()
            if self._streams.get(receiver) is not stream:
                raise FencedError(f"receiver {receiver!r} has subscribed again; this stream is over")
            if self._receivers.failures(receiver) >= _MAX_FAILURES:
                raise WeightUpdateError(
                    f"{receiver} has failed {_MAX_FAILURES} updates in a row: {self._receivers.failure(receiver)}"
                )
            if receiver in self._offered:  # until it has answered
                return False
            return self._next_for(receiver) is not None

        await self._state.changes.wait_until(
            is_more, Wait(role="weights", member=receiver, waits_for="a newer version", on_whom="the learner")
        )

    def _next_for(self, receiver: str) -> WeightManifest | None:
        have = self._receivers.base_for_update(receiver)
        if not self._streams[receiver].deltas:
            return self._chain.keyframe_after(have)
        return next(iter(self._chain.what_next(have)), None)

    async def Fetch(self, request: pb.FetchRequest, context: "Context") -> AsyncIterator[pb.FetchResponse]:
        version = version_from_proto(request.version)
        form = version, version_from_proto(request.base) if request.HasField("base") else None
        held = (*self._chain.retained(), *self._offered.values())
        manifest = next((one for one in held if form_of(one) == form), None)
        if manifest is None:
            raise WeightUpdateError(f"version {version} is not held any more; ask for the newest")
        with self._files.path(form).open("rb") as file:
            for index in request.bucket_indices or range(len(manifest.buckets)):
                if index >= len(manifest.buckets):
                    raise UsageError(f"bucket {index} was asked for; version {version} has {len(manifest.buckets)}")
                bucket = manifest.buckets[index]
                end = bucket.payload_offset + bucket.payload_bytes
                for offset in range(bucket.payload_offset, end, FRAME_BYTES):
                    file.seek(offset)
                    data = await asyncio.to_thread(file.read, min(FRAME_BYTES, end - offset))
                    yield pb.FetchResponse(bucket_index=index, offset=offset, data=data)

    async def Acknowledge(self, request: pb.AcknowledgeRequest, context: "Context") -> pb.AcknowledgeResponse:
        ack = ack_from_proto(request.ack)
        receiver = request.receiver_id
        newest = self._chain.newest
        if newest is not None and ack.version > newest:
            raise UsageError(f"receiver {receiver!r} says that it serves version {ack.version}; the newest is {newest}")
        reporting = self._state.reporting
        if request.agent_id:  # of a receiver that an agent serves; the agent keeps the books
            moved = ack.status is AckStatus.SERVING
            report_answer(reporting, receiver, ack, newest=newest, moved=moved, agent=False)
            return pb.AcknowledgeResponse()
        stream = self._streams.get(receiver)
        if stream is None:  # closed at the end of the run, before the answer came
            self._state.refuse_if_ended()
        moved = self._receivers.acknowledge(receiver, ack, self._chain.digest_of(ack.version))
        self._offered.pop(receiver, None)
        self._remove_unneeded()
        is_agent = stream is not None and stream.agent
        report_answer(reporting, receiver, ack, newest=newest, moved=moved, agent=is_agent)
        self._state.changed()
        return pb.AcknowledgeResponse()

    async def ReportWaits(self, request: pb.ReportWaitsRequest, context: "Context") -> pb.ReportWaitsResponse:
        self._agent_waits.set(request.agent_id, request.receiver_ids)
        return pb.ReportWaitsResponse()
