"""The weight chain over real gRPC: ranks publish, receivers subscribe, fetch and acknowledge."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import msgspec
import numpy as np
import pytest

from headrace.buffers.async_table import AsyncTable
from headrace.buffers.table import Table
from headrace.engine.clock import SystemClock
from headrace.engine.config import Config
from headrace.engine.errors import FencedError, HeadraceError, UsageError, WeightUpdateError
from headrace.engine.hub.flow import GroupFlow
from headrace.engine.hub.members import Limits, Members
from headrace.engine.hub.reporting import Reporting
from headrace.engine.hub.state import HubState
from headrace.engine.hub.streak import FailureStreak
from headrace.engine.hub.waits import Changes, WaitBoard
from headrace.engine.hub.weights import WeightHub
from headrace.engine.telemetry.run_folder import RunFolder
from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.server import Service, serving
from headrace.engine.transport.weight_subscriber import WeightSubscriber
from headrace.engine.transport.weights import WeightPublisher
from headrace.engine.transport.weights_convert import manifest_to_proto
from headrace.engine.types import AckStatus, PolicyVersion, TensorSpec, WeightAck, WeightUpdate
from headrace.engine.weights.keyframe import KeyframeWriter
from headrace.engine.weights.payload import open_payload, verify_payload
from headrace.v1 import weights_pb2 as pb
from headrace.v1 import weights_pb2_grpc

TENSORS = (
    TensorSpec(name="a", dtype="bfloat16", shape=(4, 3)),
    TensorSpec(name="b", dtype="float32", shape=(5,)),
)
START = PolicyVersion(0, 0)


@dataclass
class Hub:
    state: HubState
    address: str
    folder: Path
    channel: grpc.aio.Channel

    def publisher(self, rank: int = 0, num_ranks: int = 1, token: int = 1) -> WeightPublisher:
        return WeightPublisher(self.address, rank=rank, num_ranks=num_ranks, fencing_token=token)

    def subscriber(self, *, same_host: bool = True, name: str = "r") -> WeightSubscriber:
        return WeightSubscriber(
            self.channel, run_id="run", receiver_id=name, same_host=same_host, folder=self.folder / "fetched"
        )


def make_state(tmp_path: Path, num_ranks: int) -> HubState:
    config = Config()
    clock = SystemClock()
    board = WaitBoard(clock)
    folder = RunFolder.create(tmp_path / "runs", "run", "", clock.wall())
    learner = msgspec.structs.replace(config.learner, num_ranks=num_ranks)
    config = msgspec.structs.replace(config, learner=learner)
    return HubState(
        run_id="run",
        config=config,
        clock=clock,
        board=board,
        changes=Changes(clock, board),
        flow=GroupFlow(config, START, clock),
        members=Members(Limits(silent_s=60, loading_s=60, working_s=60)),
        reporting=Reporting(folder, clock),
        streak=FailureStreak(1),
        train=AsyncTable(Table("train")),
        evals=AsyncTable(Table("eval")),
        version=START,
    )


@contextlib.asynccontextmanager
async def running(tmp_path: Path, num_ranks: int = 1) -> AsyncIterator[Hub]:
    state = make_state(tmp_path, num_ranks)
    payloads = tmp_path / "payloads"
    payloads.mkdir()
    (tmp_path / "fetched").mkdir()
    hub = WeightHub(state, payloads)
    service = Service(
        name="headrace.v1.WeightService",
        add=lambda server: weights_pb2_grpc.add_WeightServiceServicer_to_server(hub, server),
    )
    async with serving([service], f"unix:{tmp_path}/s") as server, open_channel(server.address) as channel:
        yield Hub(state, server.address, tmp_path, channel)
    state.reporting.close()
    state.reporting.folder.close()


def part(folder: Path, version: int, rank: int = 0, num_ranks: int = 1, fill: int = 0) -> WeightUpdate:
    """One rank's share of a full state: rank r has every tensor's r-th piece."""
    path = folder / f"v0-{version}.bin"
    with KeyframeWriter(path, TENSORS, run_id="run", version=PolicyVersion(0, version)) as writer:
        for index, spec in enumerate(TENSORS):
            count = int(np.prod(spec.shape))
            cut = [round(count * r / num_ranks) for r in range(num_ranks + 1)]
            kind = np.uint16 if spec.dtype == "bfloat16" else np.uint32
            data = np.arange(count, dtype=kind) + kind(version * 16 + fill)
            writer.write(index, cut[rank], data[cut[rank] : cut[rank + 1]])
        return WeightUpdate(manifest=writer.manifest(), local_path=str(path))


async def first(subscriber: WeightSubscriber, have: PolicyVersion | None = START) -> WeightUpdate:
    async with contextlib.aclosing(subscriber.updates(have)) as updates:
        async for update in updates:
            return update
    raise AssertionError("the stream ended")


async def test_a_part_that_was_refused_does_not_stand_in_the_way_of_the_right_one(tmp_path: Path) -> None:
    async with running(tmp_path) as hub:
        wrong = part(tmp_path, 1)
        with pytest.raises(UsageError):
            await asyncio.to_thread(hub.publisher(3, 4).publish, wrong)
        assert await asyncio.to_thread(hub.publisher().publish, part(tmp_path / "payloads", 1))
        assert Path(wrong.local_path).exists()  # whoever published it removes it
        assert (await first(hub.subscriber())).manifest.version == PolicyVersion(0, 1)


async def test_a_version_is_announced_once_all_ranks_parts_are_there(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=2) as hub:
        waiting = asyncio.create_task(first(hub.subscriber()))
        one, two = hub.publisher(0, 2), hub.publisher(1, 2)
        assert not await asyncio.to_thread(one.publish, part(tmp_path / "payloads", 1, 0, 2))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert await asyncio.to_thread(two.publish, part(tmp_path / "payloads", 1, 1, 2))
        update = await asyncio.wait_for(waiting, 30)
        verify_payload(update)
        assert update.manifest.version == PolicyVersion(0, 1)
        assert len(open_payload(update)) == 2


async def test_a_receiver_on_another_host_fetches_the_same_bytes(tmp_path: Path) -> None:
    async with running(tmp_path) as hub:
        published = part(tmp_path / "payloads", 1)
        assert await asyncio.to_thread(hub.publisher().publish, published)
        update = await asyncio.wait_for(first(hub.subscriber(same_host=False)), 10)
        assert update.local_path.startswith(str(tmp_path / "fetched"))
        verify_payload(update)
        assert Path(update.local_path).read_bytes() == Path(published.local_path).read_bytes()


async def test_a_publisher_on_another_host_streams_its_bytes(tmp_path: Path) -> None:
    async with running(tmp_path) as hub:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        published = part(elsewhere, 1)
        assert await asyncio.to_thread(lambda: hub.publisher().publish(published, same_host=False))
        update = await asyncio.wait_for(first(hub.subscriber()), 10)
        assert Path(update.local_path).parent == tmp_path / "payloads"
        verify_payload(update)


async def test_a_lagging_receiver_gets_the_newest_version_next(tmp_path: Path) -> None:
    async with running(tmp_path) as hub:
        publisher, subscriber = hub.publisher(), hub.subscriber()
        async with contextlib.aclosing(subscriber.updates(START)) as updates:
            await asyncio.to_thread(publisher.publish, part(tmp_path / "payloads", 1))
            update = await asyncio.wait_for(anext(updates), 10)
            for version in (2, 3, 4):
                await asyncio.to_thread(publisher.publish, part(tmp_path / "payloads", version))
            ack = WeightAck(version=update.manifest.version, status=AckStatus.SERVING, digest=update.manifest.digest)
            await subscriber.acknowledge(ack)
            update = await asyncio.wait_for(anext(updates), 10)
            assert update.manifest.version == PolicyVersion(0, 4)
        assert sorted(path.name for path in (tmp_path / "payloads").iterdir()) == ["v0-3.bin", "v0-4.bin"]


async def test_version_on_success(tmp_path: Path) -> None:
    """K-017: a failed update is visible, offered anew, and after three failures the receiver is given up."""
    async with running(tmp_path) as hub:
        subscriber = hub.subscriber()
        await asyncio.to_thread(hub.publisher().publish, part(tmp_path / "payloads", 1))
        with pytest.raises(WeightUpdateError, match=r"3 updates in a row: corrupt: torn"):
            async with contextlib.aclosing(subscriber.updates(START)) as updates:
                async for update in updates:
                    assert update.manifest.version == PolicyVersion(0, 1)
                    failed = WeightAck(version=START, status=AckStatus.CORRUPT, message="torn")
                    await subscriber.acknowledge(failed)
    log = (hub.state.reporting.folder.path / "log.txt").read_text()
    assert log.count("goes on with version 0: corrupt: torn") == 3


async def test_version_on_success_a_publisher_that_stops_half_way_leaves_no_version(tmp_path: Path) -> None:
    """K-017: four chunks are due, two arrive; the stream is broken off, or ends as if that were all."""
    async with running(tmp_path) as hub:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        published = part(elsewhere, 1)
        data = Path(published.local_path).read_bytes()
        half, rest = (bucket.payload_bytes for bucket in published.manifest.buckets)
        half //= 2
        stub: weights_pb2_grpc.WeightServiceAsyncStub = weights_pb2_grpc.WeightServiceStub(hub.channel)  # type: ignore[assignment]
        header = pb.PublishHeader(num_ranks=1, fencing_token=1, manifest=manifest_to_proto(published.manifest))
        for breaks_off in (True, False):
            call = stub.Publish()
            await call.write(pb.PublishRequest(header=header))
            for start in (0, half):
                chunk = pb.WeightChunk(offset=start, data=data[start : start + half])
                await call.write(pb.PublishRequest(chunk=chunk))
            if breaks_off:
                call.cancel()
                continue
            with pytest.raises(grpc.aio.AioRpcError, match=f"came with {rest} bytes too few"):
                await call.done_writing()
                await call
        waiting = asyncio.create_task(first(hub.subscriber()))
        assert await asyncio.to_thread(lambda: hub.publisher().publish(published, same_host=False))
        verify_payload(await asyncio.wait_for(waiting, 30))


async def test_message_size_a_tensor_larger_than_a_message_may_be_goes_both_ways(tmp_path: Path) -> None:
    """K-027: 5 MiB, streamed in pieces to the hub and from it."""
    async with running(tmp_path) as hub:
        spec = TensorSpec(name="large", dtype="float32", shape=(5 << 18,))
        path = tmp_path / "large.bin"
        with KeyframeWriter(path, [spec], run_id="run", version=PolicyVersion(0, 1)) as writer:
            writer.write(0, 0, np.random.default_rng(0).standard_normal(5 << 18, np.float32))
            update = WeightUpdate(manifest=writer.manifest(), local_path=str(path))
        assert await asyncio.to_thread(lambda: hub.publisher().publish(update, same_host=False))
        fetched = await asyncio.wait_for(first(hub.subscriber(same_host=False)), 10)
        verify_payload(fetched)
        assert Path(fetched.local_path).read_bytes() == path.read_bytes()


async def test_payload_frozen_equal_weights_after_an_update_are_told_of(tmp_path: Path) -> None:
    """K-063: the alarm, after an update; not for a step that changed nothing on purpose."""
    async with running(tmp_path) as hub:
        publisher, payloads = hub.publisher(), tmp_path / "payloads"
        # The weights of a part depend on version * 16 + fill.
        for version, fill, num_updates in ((1, 48, 1), (2, 32, 1), (3, 16, 2), (4, 1, 3), (5, 0, 4)):
            hub.state.num_updates = num_updates
            assert await asyncio.to_thread(publisher.publish, part(payloads, version, fill=fill))
    log = (hub.state.reporting.folder.path / "log.txt").read_text()
    assert log.count("bit for bit") == 1
    assert "the weights of version 3 are bit for bit those of 2, although 1 updates were made" in log
    assert "learner.learning_rate" in log


async def test_a_payload_stays_until_the_receiver_that_it_was_offered_to_has_answered(tmp_path: Path) -> None:
    """It may let its samples run to their end first, for longer than several versions take."""
    async with running(tmp_path) as hub:
        publisher, subscriber, payloads = hub.publisher(), hub.subscriber(), tmp_path / "payloads"
        async with contextlib.aclosing(subscriber.updates(START)) as updates:
            await asyncio.to_thread(publisher.publish, part(payloads, 1))
            update = await asyncio.wait_for(anext(updates), 10)
            for version in (2, 3, 4):
                await asyncio.to_thread(publisher.publish, part(payloads, version))
            verify_payload(update)
            ack = WeightAck(version=update.manifest.version, status=AckStatus.SERVING, digest=update.manifest.digest)
            await subscriber.acknowledge(ack)
            assert sorted(path.name for path in payloads.iterdir()) == ["v0-3.bin", "v0-4.bin"]


async def test_a_receiver_that_subscribes_again_is_not_forgotten_with_its_old_stream(tmp_path: Path) -> None:
    async with running(tmp_path) as hub:
        old, new = hub.subscriber(), hub.subscriber()
        async with contextlib.aclosing(old.updates(START)) as before, contextlib.aclosing(new.updates(START)) as after:
            await asyncio.to_thread(hub.publisher().publish, part(tmp_path / "payloads", 1))
            assert (await asyncio.wait_for(anext(before), 10)).manifest.version == PolicyVersion(0, 1)
            update = await asyncio.wait_for(anext(after), 10)
            ack = WeightAck(version=update.manifest.version, status=AckStatus.SERVING, digest=update.manifest.digest)
            await new.acknowledge(ack)
            with pytest.raises(FencedError, match="subscribed again"):
                await asyncio.wait_for(anext(before), 10)
            await asyncio.to_thread(hub.publisher().publish, part(tmp_path / "payloads", 2))
            assert (await asyncio.wait_for(anext(after), 10)).manifest.version == PolicyVersion(0, 2)


async def test_a_receiver_cannot_serve_a_version_that_was_never_made(tmp_path: Path) -> None:
    """Taken at its word, it would be sent the newest version again and again."""
    async with running(tmp_path) as hub:
        subscriber = hub.subscriber()
        async with contextlib.aclosing(subscriber.updates(START)) as updates:
            await asyncio.to_thread(hub.publisher().publish, part(tmp_path / "payloads", 1))
            await asyncio.wait_for(anext(updates), 10)
            with pytest.raises(UsageError, match="the newest is 1"):
                await subscriber.acknowledge(WeightAck(version=PolicyVersion(0, 7), status=AckStatus.SERVING))


async def test_a_fenced_publisher_leaves_no_version(tmp_path: Path) -> None:
    async with running(tmp_path) as hub:
        hub.state.fencing_token = 2
        with pytest.raises(FencedError, match="stop this learner"):
            await asyncio.to_thread(hub.publisher(token=1).publish, part(tmp_path / "payloads", 1))
        assert await asyncio.to_thread(hub.publisher(token=2).publish, part(tmp_path / "payloads", 2))


async def test_ranks_that_disagree_leave_no_version(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=2) as hub:
        payloads = tmp_path / "payloads"
        await asyncio.to_thread(hub.publisher(0, 2).publish, part(payloads, 1, 0, 2))
        with pytest.raises(HeadraceError):
            await asyncio.to_thread(hub.publisher(1, 2).publish, part(payloads, 1, 0, 2))
        waiting = asyncio.create_task(first(hub.subscriber()))
        for rank in (0, 1):
            await asyncio.to_thread(hub.publisher(rank, 2).publish, part(payloads, 2, rank, 2))
        update = await asyncio.wait_for(waiting, 30)
        assert update.manifest.version == PolicyVersion(0, 2)
