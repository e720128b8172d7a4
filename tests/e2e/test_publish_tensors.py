"""Weights that were trained elsewhere: a real hub, its address, receivers over real gRPC."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.clients.engine import Engine
from headrace.clients.trainer import TrainerClient
from headrace.engine.config import Config, load_config
from headrace.engine.errors import ActorLostError, ConfigError, WeightUpdateError
from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.weight_subscriber import WeightSubscriber
from headrace.engine.types import AckStatus, PolicyVersion, UpdateKind, WeightAck, WeightUpdate
from headrace.engine.weights.payload import open_payload, verify_payload
from headrace.v1 import control_pb2 as pb
from headrace.v1 import control_pb2_grpc

CONFIG = """
[run]
folder = "{folder}/runs"
hub = "{hub}"
[model]
path = "elsewhere"
[data]
source = "jsonl"
path = "{folder}/prompts.jsonl"
[rollout]
launch = "external"
[learner]
launch = "external"
num_ranks = {num_ranks}
[reward]
address = "unix:{folder}/no-reward"
"""


def configuration(folder: Path, *, hub: str = "inproc", num_ranks: int = 1) -> Config:
    (folder / "prompts.jsonl").write_bytes(msgspec.json.encode({"prompt": "p"}) + b"\n")
    return load_config(None, text=CONFIG.format(folder=folder, hub=hub, num_ranks=num_ranks))


@contextlib.asynccontextmanager
async def receiver(
    engine: Engine, folder: Path
) -> AsyncGenerator[tuple[WeightSubscriber, AsyncIterator[WeightUpdate]]]:
    async with open_channel(engine.hub_address) as channel:
        stub: control_pb2_grpc.ControlServiceAsyncStub = control_pb2_grpc.ControlServiceStub(channel)  # type: ignore[assignment]
        run_id = (await stub.GetStatus(pb.GetStatusRequest())).run_id
        subscriber = WeightSubscriber(channel, run_id=run_id, receiver_id="r", same_host=True, folder=folder)
        async with contextlib.aclosing(subscriber.updates(PolicyVersion(0, 0))) as updates:
            yield subscriber, updates


@pytest.mark.parametrize("hub", ["inproc", "process"])
async def test_named_arrays_become_a_version_that_receivers_get(tmp_path: Path, hub: str) -> None:
    weights = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": ("bfloat16", np.arange(5, dtype=np.uint16))}
    async with Engine(configuration(tmp_path, hub=hub)) as engine, receiver(engine, tmp_path) as (subscriber, updates):
        for version in (1, 2):
            assert await engine.publish(weights, version)  # type: ignore[arg-type]
            update = await asyncio.wait_for(anext(updates), 30)
            verify_payload(update)
            assert update.manifest.version == PolicyVersion(0, version)
            found = open_payload(update)
            assert found["a"][0].shape == (3, 4)
            assert np.array_equal(found["a"][1].view(np.float32), weights["a"])
            assert np.array_equal(found["b"][1], weights["b"][1])
            ack = WeightAck(version=PolicyVersion(0, version), status=AckStatus.SERVING, digest=update.manifest.digest)
            await subscriber.acknowledge(ack)
            weights["a"] = weights["a"] + 1  # type: ignore[operator]
        with pytest.raises(WeightUpdateError, match="publish a newer one"):
            await engine.publish(weights, 1)  # type: ignore[arg-type]
        assert await engine.publish(weights, 3)  # type: ignore[arg-type]
    with pytest.raises(ActorLostError, match="was stopped"):
        await engine.publish(weights, 4)  # type: ignore[arg-type]


async def test_the_blocking_client_publishes_the_same(tmp_path: Path) -> None:
    def train(hub: str) -> bool:
        with TrainerClient(hub) as client:
            return client.publish_tensors({"w": np.ones(3, np.float32)}, 1)

    async with Engine(configuration(tmp_path)) as engine, receiver(engine, tmp_path) as (_, updates):
        assert await asyncio.to_thread(train, engine.hub_address)
        update = await asyncio.wait_for(anext(updates), 30)
        assert update.manifest.kind is UpdateKind.KEYFRAME
        assert open_payload(update)["w"][1].view(np.float32).tolist() == [1.0, 1.0, 1.0]


async def test_a_run_that_awaits_parts_of_several_ranks_takes_no_whole_tensors(tmp_path: Path) -> None:
    async with Engine(configuration(tmp_path, num_ranks=2)) as engine:
        with pytest.raises(ConfigError, match=r"learner\.num_ranks = 2"):
            await engine.publish({"w": np.ones(3, np.float32)}, 1)
