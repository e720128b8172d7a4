"""The agent's process: the WeightService for the receivers of its host, on a Unix socket."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio

from headrace.engine.errors import UsageError
from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.convert import version_from_proto
from headrace.engine.transport.server import Service, serving
from headrace.engine.transport.weight_subscriber import WeightSubscriber
from headrace.engine.transport.weights_convert import ack_from_proto, update_to_proto
from headrace.engine.weights.agent import WeightAgent
from headrace.v1 import weights_pb2 as pb
from headrace.v1 import weights_pb2_grpc

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[object, object]

# For streams to hear of the run's end.
_GRACE_S = 1.0


def main(
    hub: str, address: str, run_id: str, agent_id: str, folder: str, fallback: str = "", same_host: bool = True
) -> None:
    """Serve the receivers of this host until the run ends. Entry of the child process.

    Args:
        hub: Address of the hub.
        address: Where receivers subscribe; of this host alone.
        run_id: Of the run.
        agent_id: Unique within the run.
        folder: Takes the copy of the state and the files made from it; ours alone, best in shared memory.
        fallback: Likewise, on a disk; for what finds no room in `folder`.
        same_host: The hub shares our file system.

    Raises:
        ActorLostError: The hub is gone.
        StorageError: There is no room for the copy.
        WeightUpdateError: Too many updates in a row were damaged.
    """
    other = Path(fallback) if fallback else None
    asyncio.run(run_agent(hub, address, run_id, agent_id, Path(folder), fallback=other, same_host=same_host))


async def run_agent(
    hub: str,
    address: str,
    run_id: str,
    agent_id: str,
    folder: Path,
    *,
    fallback: Path | None = None,
    same_host: bool = True,
) -> None:
    """As `main`, on this event loop. Cancelling ends it; the folder is removed."""
    async with open_channel(hub) as channel:
        subscriber = WeightSubscriber(
            channel,
            run_id=run_id,
            receiver_id=agent_id,
            same_host=same_host,
            folder=folder,
            deltas=True,
            agent=True,
        )
        agent = WeightAgent(subscriber, folder, run_id, fallback=fallback)
        try:
            async with serving([agent_service(agent)], address, grace_s=_GRACE_S):
                await agent.follow()
        finally:
            await asyncio.to_thread(agent.close)


def agent_service(agent: WeightAgent) -> Service:
    """The service to add to a server."""
    return Service(
        name="headrace.v1.WeightService",
        add=lambda server: weights_pb2_grpc.add_WeightServiceServicer_to_server(AgentServicer(agent), server),
    )


class AgentServicer(weights_pb2_grpc.WeightServiceServicer):
    """Subscribe and Acknowledge, for receivers that share the agent's host; payloads are files."""

    def __init__(self, agent: WeightAgent) -> None:
        self._agent = agent

    async def Subscribe(self, request: pb.SubscribeRequest, context: "Context") -> AsyncIterator[pb.SubscribeResponse]:
        if request.run_id != self._agent.run_id or not request.receiver_id or not request.same_host:
            raise UsageError(
                f"receiver {request.receiver_id!r} of run {request.run_id!r} subscribes at an agent, which serves "
                f"receivers of run {self._agent.run_id!r} on its own host; subscribe at the hub"
            )
        have = version_from_proto(request.have) if request.HasField("have") else None
        stream = self._agent.subscribe(request.receiver_id, have, deltas=request.deltas)
        try:
            while True:
                update = await self._agent.next_update(stream)
                yield pb.SubscribeResponse(update=update_to_proto(update))
        finally:
            await self._agent.leave(stream)

    async def Acknowledge(self, request: pb.AcknowledgeRequest, context: "Context") -> pb.AcknowledgeResponse:
        await self._agent.acknowledge(request.receiver_id, ack_from_proto(request.ack))
        return pb.AcknowledgeResponse()

    async def Publish(
        self, request_iterator: AsyncIterator[pb.PublishRequest], context: "Context"
    ) -> pb.PublishResponse:
        raise UsageError("weights are published at the hub, not at an agent")

    async def ReportWaits(self, request: pb.ReportWaitsRequest, context: "Context") -> pb.ReportWaitsResponse:
        raise UsageError("waits are reported to the hub, not to an agent")

    async def Fetch(self, request: pb.FetchRequest, context: "Context") -> AsyncIterator[pb.FetchResponse]:
        raise UsageError("an agent's payloads are files of its host; fetch from the hub")
        yield pb.FetchResponse()
