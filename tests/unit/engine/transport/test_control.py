"""What a member's heartbeats say, and when they go: news at once, the rest every so often."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.control import BlockingControlClient, ControlClient
from headrace.engine.transport.server import Service, serving
from headrace.v1 import control_pb2 as pb
from headrace.v1 import control_pb2_grpc

_NEVER_S = 3600.0  # between two heartbeats, so that one that comes can only have been sent for its news
CONFIG = '[model]\npath = "scripted"\n[data]\npath = "prompts.jsonl"\n[reward]\nfunction = "math:sqrt"\n'


class Hub(control_pb2_grpc.ControlServiceServicer):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.address = ""
        self.heard: asyncio.Queue[pb.HeartbeatRequest] = asyncio.Queue()
        self.ending = False

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        self.heard.put_nowait(request)
        return pb.HeartbeatResponse(stop=self.ending)

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinResponse:
        return pb.JoinResponse(run_id="run", config_toml=CONFIG)

    async def next(self) -> pb.HeartbeatRequest:
        return await asyncio.wait_for(self.heard.get(), 30)


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    found = Hub()
    service = Service(
        name="headrace.v1.ControlService",
        add=lambda server: control_pb2_grpc.add_ControlServiceServicer_to_server(found, server),
    )
    async with serving([service], "127.0.0.1:0") as server:
        found.address = server.address
        yield found


async def test_a_change_of_phase_and_a_note_are_told_at_once(hub: Hub) -> None:
    async with open_channel(hub.address) as channel:
        control = ControlClient(channel, pb.ROLE_ROLLOUT, "rollout-0", heartbeat_s=_NEVER_S)
        control.progress.moved("loading the model", pb.PHASE_LOADING)
        beating = asyncio.create_task(control.heartbeats())
        assert (await hub.next()).phase == pb.PHASE_LOADING
        control.progress.moved("still loading", pb.PHASE_LOADING)  # no news
        control.progress.moved("waiting for groups", pb.PHASE_READY)
        heard = await hub.next()
        assert (heard.phase, heard.wait.waits_for, heard.progress) == (pb.PHASE_READY, "waiting for groups", 3)
        hub.ending = True
        await asyncio.to_thread(control.progress.say, "from another thread")
        assert (await hub.next()).note == "from another thread"
        await beating
        control.progress.say("nobody hears this, and nothing fails")


async def test_the_heartbeats_of_a_rank_tell_a_change_of_phase_at_once(hub: Hub) -> None:
    control = BlockingControlClient(hub.address, pb.ROLE_LEARNER, "learner-0", heartbeat_s=_NEVER_S)
    await asyncio.to_thread(control.join, 0)
    await hub.next()
    control.progress.moved("ready", pb.PHASE_READY)
    assert (await hub.next()).phase == pb.PHASE_READY
    await asyncio.to_thread(control.close)
