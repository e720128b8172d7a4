"""Deltas over real gRPC: parts of several ranks, receivers with and without deltas, a rank that dies half-way."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from headrace.buffers.async_table import AsyncTable
from headrace.buffers.table import Table
from headrace.engine.clock import SystemClock
from headrace.engine.config import Config
from headrace.engine.errors import CorruptUpdateError, WrongBaseError
from headrace.engine.hub.flow import GroupFlow
from headrace.engine.hub.members import Limits, Members
from headrace.engine.hub.reporting import Reporting
from headrace.engine.hub.state import HubState
from headrace.engine.hub.streak import FailureStreak
from headrace.engine.hub.waits import Changes, Wait, WaitBoard
from headrace.engine.hub.weights import WeightHub
from headrace.engine.telemetry.run_folder import RunFolder
from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.convert import version_to_proto
from headrace.engine.transport.server import Service, serving
from headrace.engine.transport.weights import WeightPublisher
from headrace.engine.transport.weights_convert import ack_to_proto, manifest_to_proto, update_from_proto
from headrace.engine.types import AckStatus, PolicyVersion, TensorSpec, UpdateKind, WeightAck, WeightPart, WeightUpdate
from headrace.engine.weights.delta import apply_change, decode_bucket, encoded_bucket
from headrace.engine.weights.payload import open_payload, verify_payload
from headrace.engine.weights.sender import HostBits, Shard, WeightSender
from headrace.v1 import weights_pb2 as pb
from headrace.v1 import weights_pb2_grpc

TENSORS = (TensorSpec(name="a", dtype="bfloat16", shape=(1000,)),)
START = PolicyVersion(0, 0)
WAIT = Wait(role="test", member="t", waits_for="a subscription")
Bits = npt.NDArray[np.uint16 | np.uint32]


def at(version: int) -> PolicyVersion:
    return PolicyVersion(0, version)


@dataclass
class Hub:
    state: HubState
    service: WeightHub
    address: str
    payloads: Path
    stub: "weights_pb2_grpc.WeightServiceAsyncStub"

    def publisher(self, rank: int = 0, token: int = 1) -> WeightPublisher:
        num_ranks = self.state.config.learner.num_ranks
        return WeightPublisher(self.address, rank=rank, num_ranks=num_ranks, fencing_token=token)

    @contextlib.asynccontextmanager
    async def subscribed(
        self, name: str = "r", *, deltas: bool = True, have: PolicyVersion = START, same_host: bool = True
    ) -> AsyncGenerator[AsyncIterator[WeightUpdate]]:
        """A subscription that the hub knows of."""
        call = self.stub.Subscribe(
            pb.SubscribeRequest(
                run_id="run", receiver_id=name, have=version_to_proto(have), same_host=same_host, deltas=deltas
            )
        )
        await self.state.changes.wait_until(lambda: name in self.service._streams, WAIT)

        async def updates() -> AsyncIterator[WeightUpdate]:
            async for message in call:
                yield update_from_proto(message.update)

        try:
            yield updates()
        finally:
            call.cancel()

    async def acknowledge(self, update: WeightUpdate, name: str = "r") -> None:
        manifest = update.manifest
        ack = WeightAck(version=manifest.version, status=AckStatus.SERVING, digest=manifest.digest)
        await self.stub.Acknowledge(pb.AcknowledgeRequest(run_id="run", receiver_id=name, ack=ack_to_proto(ack)))


@contextlib.asynccontextmanager
async def running(tmp_path: Path, num_ranks: int = 1) -> AsyncGenerator[Hub]:
    config = Config()
    config = msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, num_ranks=num_ranks))
    clock = SystemClock()
    board = WaitBoard(clock)
    state = HubState(
        run_id="run",
        config=config,
        clock=clock,
        board=board,
        changes=Changes(clock, board),
        flow=GroupFlow(config, START, clock),
        members=Members(Limits(silent_s=60, loading_s=60, working_s=60)),
        reporting=Reporting(RunFolder.create(tmp_path / "runs", "run", "", clock.wall()), clock),
        streak=FailureStreak(1),
        train=AsyncTable(Table("train")),
        evals=AsyncTable(Table("eval")),
        version=START,
    )
    payloads = tmp_path / "payloads"
    payloads.mkdir()
    hub = WeightHub(state, payloads)
    service = Service(
        name="headrace.v1.WeightService",
        add=lambda server: weights_pb2_grpc.add_WeightServiceServicer_to_server(hub, server),
    )
    async with serving([service], f"unix:{tmp_path}/s") as server, open_channel(server.address) as channel:
        stub: weights_pb2_grpc.WeightServiceAsyncStub = weights_pb2_grpc.WeightServiceStub(channel)  # type: ignore[assignment]
        yield Hub(state, hub, server.address, payloads, stub)
    state.reporting.close()
    state.reporting.folder.close()


class Ranks:
    """Senders of all ranks, which hold a piece each."""

    def __init__(self, num_ranks: int, keyframe_steps: int = 25) -> None:
        self.senders = [
            WeightSender(TENSORS, run_id="run", rank=rank, keyframe_steps=keyframe_steps, bits=HostBits())
            for rank in range(num_ranks)
        ]
        self.state: Bits = np.arange(1000, dtype=np.uint16) * np.uint16(7)

    def move(self, seed: int) -> None:
        changed = np.random.default_rng(seed).random(1000) < 0.02
        self.state = self.state + changed.astype(np.uint16)

    def parts(self, version: int, since: int | None, folder: Path) -> list[WeightPart]:
        base = None if since is None else at(since)
        full = any([sender.needs_keyframe(at(version), base) for sender in self.senders])
        cuts = np.linspace(0, 1000, len(self.senders) + 1).astype(int)
        found: list[WeightPart] = []
        for sender, begin, end in zip(self.senders, cuts, cuts[1:], strict=False):
            runs = ((int(begin), int(end - begin)),)
            shard = Shard(tensor_index=0, runs=runs, elements=self.state[begin:end])
            found.append(sender.stage(at(version), [shard], full=full).write(folder))
        return found


async def publish(hub: Hub, parts: Sequence[WeightUpdate], *, same_host: bool = True, token: int = 1) -> list[bool]:
    return [
        await asyncio.to_thread(hub.publisher(rank, token).publish, part, same_host=same_host)
        for rank, part in enumerate(parts)
    ]


def taken(update: WeightUpdate) -> Bits:
    verify_payload(update)
    return open_payload(update)["a"][1].copy()


def applied(state: Bits, update: WeightUpdate, payload: bytes | None = None) -> Bits:
    state = state.copy()
    view = memoryview(Path(update.local_path).read_bytes() if payload is None else payload)
    for bucket in update.manifest.buckets:
        target = state[bucket.start : bucket.start + bucket.count]
        apply_change(target, decode_bucket(encoded_bucket(bucket, view), target))
    return state


@pytest.mark.parametrize("same_host", [True, False])
async def test_deltas_of_two_ranks_come_as_one_update_and_lead_to_the_senders_state(
    tmp_path: Path, same_host: bool
) -> None:
    ranks, elsewhere = Ranks(2), tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with running(tmp_path, num_ranks=2) as hub, hub.subscribed() as updates:
        folder = hub.payloads if same_host else elsewhere
        assert await publish(hub, ranks.parts(1, None, folder), same_host=same_host) == [False, True]
        update = await anext(updates)
        state = taken(update)
        for version in range(2, 6):
            await hub.acknowledge(update)
            ranks.move(version)
            assert await publish(hub, ranks.parts(version, version - 1, folder), same_host=same_host) == [False, True]
            update = await anext(updates)
            assert (update.manifest.version, update.manifest.base) == (at(version), at(version - 1))
            state = applied(state, update)
            assert np.array_equal(state, ranks.state)
        rows = hub.state.reporting.parts.take()
    assert rows["weights/density"] == pytest.approx(0.02, abs=0.02)
    assert rows["weights/encode_s"] > 0


async def test_a_fetched_delta_is_that_of_the_base_that_is_named(tmp_path: Path) -> None:
    ranks = Ranks(2)
    async with running(tmp_path, num_ranks=2) as hub, hub.subscribed(same_host=False) as updates:
        await publish(hub, ranks.parts(1, None, hub.payloads))
        update = await anext(updates)
        state = ranks.state
        ranks.move(2)
        await publish(hub, ranks.parts(2, 1, hub.payloads))
        await hub.acknowledge(update)
        update = await anext(updates)
        assert update.local_path == ""
        request = pb.FetchRequest(run_id="run", version=version_to_proto(at(2)), base=version_to_proto(at(1)))
        payload = bytearray(update.manifest.payload_bytes)
        async for piece in hub.stub.Fetch(request):
            payload[piece.offset : piece.offset + len(piece.data)] = piece.data
        assert np.array_equal(applied(state, update, bytes(payload)), ranks.state)


async def test_a_late_receiver_takes_the_keyframe_and_the_deltas_after_it_one_by_one(tmp_path: Path) -> None:
    ranks = Ranks(1)
    async with running(tmp_path) as hub:
        for version in range(1, 5):
            await publish(hub, ranks.parts(version, version - 1 or None, hub.payloads))
            ranks.move(version)
        async with hub.subscribed() as updates:
            for version in range(1, 5):
                update = await anext(updates)
                assert update.manifest.version == at(version)
                await hub.acknowledge(update)


async def test_files_are_kept_from_the_newest_keyframe_on(tmp_path: Path) -> None:
    ranks = Ranks(2, keyframe_steps=4)
    async with running(tmp_path, num_ranks=2) as hub:
        seen: list[set[str]] = []
        for version in range(1, 8):
            await publish(hub, ranks.parts(version, version - 1 or None, hub.payloads))
            ranks.move(version)
            seen.append({path.name for path in hub.payloads.iterdir()})
    deltas = [f"v0-{version}-from-0-{version - 1}.bin" for version in range(8)]
    assert seen[3] == {"keyframe-0-1.bin", *deltas[2:5]}
    assert seen[6] == {"keyframe-0-5.bin", *deltas[6:8]}


async def test_a_receiver_without_deltas_gets_keyframes_alone_and_publishers_hear_of_it(tmp_path: Path) -> None:
    ranks = Ranks(1)
    async with running(tmp_path) as hub:
        publisher = hub.publisher()
        await asyncio.to_thread(publisher.publish, ranks.parts(1, None, hub.payloads)[0])
        assert not publisher.takes_deltas  # nobody is there
        async with hub.subscribed("agent"):
            ranks.move(1)
            await asyncio.to_thread(publisher.publish, ranks.parts(2, 1, hub.payloads)[0])
            assert publisher.takes_deltas
            async with hub.subscribed("old", deltas=False) as updates:
                update = await anext(updates)
                assert update.manifest.version == at(1)
                await hub.acknowledge(update, "old")
                ranks.move(2)
                await asyncio.to_thread(publisher.publish, ranks.parts(3, 2, hub.payloads)[0])
                assert not publisher.takes_deltas
                ranks.move(3)
                await asyncio.to_thread(publisher.publish, ranks.parts(4, None, hub.payloads)[0])
                update = await anext(updates)
                assert (update.manifest.version, update.manifest.kind) == (at(4), UpdateKind.KEYFRAME)


async def test_version_on_success_a_rank_killed_in_the_middle_of_a_delta_leaves_no_version(tmp_path: Path) -> None:
    """K-017: its successor publishes other weights under that number, and nobody ever sees the first ones."""
    ranks = Ranks(2)
    async with running(tmp_path, num_ranks=2) as hub, hub.subscribed() as updates:
        await publish(hub, ranks.parts(1, None, hub.payloads))
        await hub.acknowledge(await anext(updates))
        ranks.move(1)
        lost = ranks.parts(2, 1, hub.payloads)
        assert not await asyncio.to_thread(hub.publisher(0).publish, lost[0])
        call = hub.stub.Publish()
        header = pb.PublishHeader(rank=1, num_ranks=2, fencing_token=1, manifest=manifest_to_proto(lost[1].manifest))
        await call.write(pb.PublishRequest(header=header))
        await call.write(
            pb.PublishRequest(chunk=pb.WeightChunk(offset=0, data=Path(lost[1].local_path).read_bytes()[:5]))
        )
        call.cancel()
        hub.state.fencing_token = 2
        following = asyncio.ensure_future(anext(updates))
        successor = Ranks(2)
        successor.move(7)
        assert await publish(hub, successor.parts(2, None, hub.payloads), token=2) == [False, True]
        update = await following
        assert (update.manifest.version, update.manifest.kind) == (at(2), UpdateKind.KEYFRAME)
        assert np.array_equal(taken(update), successor.state)
        successor.move(8)
        await hub.acknowledge(update)
        await publish(hub, successor.parts(3, 2, hub.payloads), token=2)
        assert np.array_equal(applied(taken(update), await anext(updates)), successor.state)
        # What the dead rank never offered goes with the folder.
        left = {path.name for path in hub.payloads.iterdir()} - {Path(lost[1].local_path).name}
        assert left == {"keyframe-0-2.bin", "v0-3-from-0-2.bin"}


async def test_a_delta_from_a_version_that_the_hub_does_not_hold_is_refused_and_forgotten(tmp_path: Path) -> None:
    ranks = Ranks(1)
    async with running(tmp_path) as hub, hub.subscribed() as updates:
        await publish(hub, ranks.parts(1, None, hub.payloads))
        other = Ranks(1)
        other.parts(5, None, hub.payloads)
        with pytest.raises(WrongBaseError, match="publish a keyframe"):
            await publish(hub, other.parts(6, 5, hub.payloads))
        await hub.acknowledge(await anext(updates))
        ranks.move(1)
        assert await publish(hub, ranks.parts(2, 1, hub.payloads)) == [True]
        assert (await anext(updates)).manifest.base == at(1)


async def test_a_part_whose_file_is_cut_short_seals_nothing(tmp_path: Path) -> None:
    ranks = Ranks(2)
    async with running(tmp_path, num_ranks=2) as hub:
        await publish(hub, ranks.parts(1, None, hub.payloads))
        ranks.move(1)
        parts = ranks.parts(2, 1, hub.payloads)
        whole = Path(parts[1].local_path).read_bytes()
        Path(parts[1].local_path).write_bytes(whole[:-1])
        with pytest.raises(CorruptUpdateError, match="its manifest says"):
            await publish(hub, parts)
        assert hub.service.newest == at(1)
        Path(parts[1].local_path).write_bytes(whole)
        assert await asyncio.to_thread(hub.publisher(1).publish, parts[1])


async def test_a_part_that_is_offered_again_changes_nothing(tmp_path: Path) -> None:
    ranks = Ranks(2)
    async with running(tmp_path, num_ranks=2) as hub, hub.subscribed() as updates:
        await publish(hub, ranks.parts(1, None, hub.payloads))
        await hub.acknowledge(await anext(updates))
        state = ranks.state
        ranks.move(1)
        parts = ranks.parts(2, 1, hub.payloads)
        await publish(hub, parts)
        assert await publish(hub, parts) == [True, True]
        assert np.array_equal(applied(state, await anext(updates)), ranks.state)
