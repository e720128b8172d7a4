"""The engine's own line for weights that were trained elsewhere; opened with the first of them."""

import asyncio
import logging
from collections.abc import Mapping

import grpc.aio

from headrace.engine.config import Config
from headrace.engine.transport.status import error_from_rpc
from headrace.engine.transport.tensor_publisher import TensorLike, TensorPublisher, run_publisher
from headrace.engine.transport.weights import WeightPublisher
from headrace.engine.types import PolicyVersion
from headrace.v1 import control_pb2 as pb
from headrace.v1 import control_pb2_grpc

log = logging.getLogger(__name__)


class EnginePublisher:
    """Publishes states one after the other, each in a thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = asyncio.Lock()
        self._opened: tuple[WeightPublisher, TensorPublisher] | None = None

    async def publish(
        self,
        control: "control_pb2_grpc.ControlServiceAsyncStub",
        address: str,
        tensors: Mapping[str, TensorLike],
        version: int,
    ) -> bool:
        """See `Engine.publish`. Cancelling does not withdraw what a thread is sending."""
        return await asyncio.shield(asyncio.create_task(self._publish(control, address, tensors, version)))

    def close(self) -> None:
        """Close the line; a state that is under way fails. May be called twice."""
        if self._opened is not None:
            self._opened[0].close()
            self._opened = None

    async def _publish(
        self,
        control: "control_pb2_grpc.ControlServiceAsyncStub",
        address: str,
        tensors: Mapping[str, TensorLike],
        version: int,
    ) -> bool:
        async with self._lock:
            try:
                status = await control.GetStatus(pb.GetStatusRequest(), timeout=30)
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error, "publishing weights") from error
            if self._opened is None:
                self._opened = run_publisher(
                    address,
                    run_id=status.run_id,
                    fencing_token=status.fencing_token,
                    payload_dir=status.payload_dir,
                    run_folder=status.run_folder,
                    num_ranks=self._config.learner.num_ranks,
                    keyframe_steps=self._config.weights.keyframe_steps,
                    say=log.warning,
                )
            target = PolicyVersion(status.version.incarnation, version)
            return await asyncio.to_thread(self._opened[1].publish, tensors, target)
