"""The services that a hub offers at its one address."""

from typing import Any, cast

from headrace.engine.hub.batches import HubBuffer
from headrace.engine.hub.control import ControlHub
from headrace.engine.hub.rollouts import Rollouts
from headrace.engine.hub.weights import WeightHub
from headrace.engine.plugins import load_object
from headrace.engine.transport.server import Service
from headrace.v1 import control_pb2_grpc, rollout_pb2_grpc, weights_pb2_grpc


def hub_services(buffer: HubBuffer, control: ControlHub, rollouts: Rollouts, weights: WeightHub) -> list[Service]:
    """The buffer's, by lazy name, for the engine imports no buffer; and the hub's own three."""
    buffer_service = cast(Any, load_object("headrace.buffers.service:buffer_service"))
    return [
        cast(Service, buffer_service(buffer)),
        Service(
            name="headrace.v1.ControlService",
            add=lambda server: control_pb2_grpc.add_ControlServiceServicer_to_server(control, server),
        ),
        Service(
            name="headrace.v1.RolloutService",
            add=lambda server: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(rollouts, server),
        ),
        Service(
            name="headrace.v1.WeightService",
            add=lambda server: weights_pb2_grpc.add_WeightServiceServicer_to_server(weights, server),
        ),
    ]
