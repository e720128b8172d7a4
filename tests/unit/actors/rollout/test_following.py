"""A worker subscribes again with what it has when its agent is replaced, and from nothing if its engine is broken."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.actors.rollout.following import follow_weights
from headrace.engine.config import Config
from headrace.engine.errors import ActorLostError, StoppedError
from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.control import Joined
from headrace.engine.transport.convert import version_from_proto, version_to_proto
from headrace.engine.transport.server import Service, serving
from headrace.engine.types import AckStatus, PolicyVersion, WeightAck, WeightUpdate
from headrace.v1 import weights_pb2 as pb
from headrace.v1 import weights_pb2_grpc

START = PolicyVersion(0, 0)


class Agent(weights_pb2_grpc.WeightServiceServicer):
    """Offers version 1, 2, ... on each new stream, breaks off after one answer, and ends the run on the last stream."""

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self.requests: list[pb.SubscribeRequest] = []
        self.answered = asyncio.Event()

    async def Subscribe(self, request: pb.SubscribeRequest, context: object) -> AsyncIterator[pb.SubscribeResponse]:
        self.requests.append(request)
        number = len(self.requests)
        if number == self.streams:
            raise StoppedError("the run is ending")
        manifest = pb.WeightManifest(version=version_to_proto(PolicyVersion(0, number)), kind=pb.UPDATE_KIND_KEYFRAME)
        self.answered.clear()
        yield pb.SubscribeResponse(update=pb.WeightUpdate(manifest=manifest, local_path="/x"))
        await self.answered.wait()
        raise ActorLostError("the agent of this host is ending; subscribe again")

    async def Acknowledge(self, request: pb.AcknowledgeRequest, context: object) -> pb.AcknowledgeResponse:
        self.answered.set()
        return pb.AcknowledgeResponse()


def joined(agent_address: str) -> Joined:
    return Joined(
        run_id="run",
        incarnation=0,
        config=Config(),
        version=START,
        fencing_token=1,
        resume_from="",
        run_folder="",
        payload_dir="",
        agent_address=agent_address,
    )


@contextlib.asynccontextmanager
async def running(agent: Agent, address: str) -> AsyncIterator[None]:
    service = Service(
        name="headrace.v1.WeightService",
        add=lambda server: weights_pb2_grpc.add_WeightServiceServicer_to_server(agent, server),
    )
    async with serving([service], address):
        yield


@pytest.mark.parametrize(
    ("status", "digest", "have"),
    [
        (AckStatus.SERVING, 5, PolicyVersion(0, 1)),
        (AckStatus.CORRUPT, 0, START),
        (AckStatus.FAILED, 5, START),
        (AckStatus.FAILED, 0, None),
    ],
)
async def test_the_next_stream_begins_with_what_the_engine_serves(
    tmp_path: Path, status: AckStatus, digest: int, have: PolicyVersion | None
) -> None:
    agent, address = Agent(2), f"unix:{tmp_path}/s"

    async def apply(update: WeightUpdate) -> WeightAck:
        serves = update.manifest.version if status is AckStatus.SERVING else START
        return WeightAck(version=serves, status=status, digest=digest)

    async with running(agent, address), open_channel(address) as hub:
        await asyncio.wait_for(
            follow_weights(hub, joined(address), "r", START, apply, same_host=True, folder=tmp_path), 30
        )
    first, second = agent.requests
    assert first.deltas and first.same_host and version_from_proto(first.have) == START
    assert (version_from_proto(second.have) if second.HasField("have") else None) == have


@pytest.mark.parametrize(("agent_address", "same_host"), [("", True), ("unix:/absent", False)])
async def test_without_an_agent_on_its_host_a_worker_subscribes_at_the_hub_and_takes_no_deltas(
    tmp_path: Path, agent_address: str, same_host: bool
) -> None:
    hub_service, address = Agent(1), f"unix:{tmp_path}/s"

    async def apply(update: WeightUpdate) -> WeightAck:
        raise AssertionError("nothing was offered")

    async with running(hub_service, address), open_channel(address) as hub:
        run = joined(agent_address)
        await asyncio.wait_for(follow_weights(hub, run, "r", START, apply, same_host=same_host, folder=tmp_path), 30)
    (request,) = hub_service.requests
    assert not request.deltas and request.same_host is same_host
