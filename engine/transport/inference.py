"""An inference backend across gRPC: a servicer that exposes any, and a client that is one."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from headrace.engine.errors import FormatError
from headrace.engine.interfaces import InferenceBackend
from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.convert import (
    sampling_from_proto,
    sampling_to_proto,
    version_from_proto,
    version_to_proto,
)
from headrace.engine.transport.server import Service
from headrace.engine.transport.status import error_from_rpc
from headrace.engine.transport.weights_convert import (
    ack_from_proto,
    ack_to_proto,
    update_from_proto,
    update_to_proto,
)
from headrace.engine.types import (
    EngineState,
    FinishReason,
    GenerateRequest,
    PauseMode,
    PolicyVersion,
    TokenChunk,
    WeightAck,
    WeightUpdate,
)
from headrace.v1 import inference_pb2 as pb
from headrace.v1 import inference_pb2_grpc as rpc
from headrace.v1 import trajectory_pb2

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

# Loading takes seconds even for large models; what takes longer than this is lost.
APPLY_TIMEOUT_S = 600.0
CONTROL_TIMEOUT_S = 60.0


def inference_service(backend: InferenceBackend) -> Service:
    """What a `GrpcServer` needs to expose a started backend. The caller still owns and closes the backend."""
    servicer = _InferenceServicer(backend)
    return Service(
        name="headrace.v1.InferenceService",
        add=lambda server: rpc.add_InferenceServiceServicer_to_server(servicer, server),
    )


class _InferenceServicer(rpc.InferenceServiceServicer):
    def __init__(self, backend: InferenceBackend) -> None:
        self._backend = backend

    async def Generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.GenerateRequest, context: "Context"
    ) -> AsyncIterator[pb.GenerateResponse]:
        chunks = self._backend.generate(
            GenerateRequest(
                request_id=request.request_id,
                token_ids=tuple(request.token_ids),
                sampling=sampling_from_proto(request.sampling),
                min_version=version_from_proto(request.min_version),
            )
        )
        try:
            async for chunk in chunks:
                yield pb.GenerateResponse(
                    token_ids=chunk.token_ids,
                    logprobs=chunk.logprobs,
                    policy_version=version_to_proto(chunk.policy_version),
                    finish_reason=trajectory_pb2.FinishReason.ValueType(chunk.finish_reason),
                )
        finally:
            # The caller has gone or the stream has ended: either way nothing may go on generating for it.
            await chunks.aclose()

    async def Pause(self, request: pb.PauseRequest, context: "Context") -> pb.PauseResponse:
        try:
            mode = PauseMode(request.mode)
        except ValueError:
            raise FormatError(f"Pause mode {request.mode} is not known; send KEEP (1) or ABORT (2).") from None
        await self._backend.pause(mode)
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: "Context") -> pb.ResumeResponse:
        await self._backend.resume()
        return pb.ResumeResponse()

    async def Apply(self, request: pb.ApplyRequest, context: "Context") -> pb.ApplyResponse:
        ack = await self._backend.apply(update_from_proto(request.update))
        return pb.ApplyResponse(ack=ack_to_proto(ack))

    async def GetState(self, request: pb.GetStateRequest, context: "Context") -> pb.GetStateResponse:
        state = await self._backend.state()
        return pb.GetStateResponse(
            model=state.model,
            backend=state.backend,
            policy_version=version_to_proto(state.policy_version),
            num_running=state.num_running,
            num_waiting=state.num_waiting,
            max_context_tokens=state.max_context_tokens,
            num_tokens=state.num_tokens,
        )


class RemoteInferenceBackend:
    """An `InferenceBackend` that lives behind an address.

    Errors arrive as the class that the other side raised; a connection that breaks is an ActorLostError.

    Args:
        address: `grpc://host:port` or `unix:/path`.
        start_timeout_s: How long `start` waits for the other side to answer.
    """

    def __init__(self, address: str, *, start_timeout_s: float = 600.0) -> None:
        self._address = address
        self._start_timeout_s = start_timeout_s
        self._channel: grpc.aio.Channel | None = None

    async def start(self) -> None:
        """Connect and wait until the backend answers.

        Raises:
            DeadlineError: It did not within `start_timeout_s`.
            ConfigError: The address is malformed.
        """
        self._channel = open_channel(self._address, setting="the inference backend's address")
        try:
            await self._stub().GetState(pb.GetStateRequest(), timeout=self._start_timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"connecting to the inference backend {self._address}") from error

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        """Stream one sample. Closing the iterator or cancelling its reader cancels the call, and so the sample.

        Raises:
            WeightUpdateError, UsageError: As the backend behind the address.
            ActorLostError: The connection broke.
        """
        call = self._stub().Generate(
            pb.GenerateRequest(
                request_id=request.request_id,
                token_ids=request.token_ids,
                sampling=sampling_to_proto(request.sampling),
                min_version=version_to_proto(request.min_version),
            )
        )
        try:
            async for answer in call:
                yield TokenChunk(
                    token_ids=tuple(answer.token_ids),
                    logprobs=tuple(answer.logprobs),
                    policy_version=version_from_proto(answer.policy_version),
                    finish_reason=FinishReason(answer.finish_reason),
                )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"generating {request.request_id} at {self._address}") from error
        finally:
            # Leaving the loop does not stop the other side by itself.
            call.cancel()

    async def pause(self, mode: PauseMode) -> None:
        """As `InferenceBackend.pause`, within CONTROL_TIMEOUT_S."""
        message = pb.PauseRequest(mode=pb.PauseMode.ValueType(mode))
        try:
            await self._stub().Pause(message, timeout=CONTROL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"pausing {self._address}") from error

    async def resume(self) -> None:
        """As `InferenceBackend.resume`, within CONTROL_TIMEOUT_S."""
        try:
            await self._stub().Resume(pb.ResumeRequest(), timeout=CONTROL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"resuming {self._address}") from error

    async def apply(self, update: WeightUpdate) -> WeightAck:
        """As `InferenceBackend.apply`, within APPLY_TIMEOUT_S. Only the manifest travels; the file must be shared.

        Raises:
            ActorLostError, DeadlineError: No answer came, so what is served is not known.
        """
        message = pb.ApplyRequest(update=update_to_proto(update))
        try:
            answer = await self._stub().Apply(message, timeout=APPLY_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            version = update.manifest.version
            raise error_from_rpc(error, f"applying version {version} at {self._address}") from error
        return ack_from_proto(answer.ack)

    async def state(self) -> EngineState:
        """As `InferenceBackend.state`, within CONTROL_TIMEOUT_S."""
        try:
            answer = await self._stub().GetState(pb.GetStateRequest(), timeout=CONTROL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"asking {self._address} for its state") from error
        return EngineState(
            model=answer.model,
            backend=answer.backend,
            policy_version=PolicyVersion(answer.policy_version.incarnation, answer.policy_version.version),
            num_running=answer.num_running,
            num_waiting=answer.num_waiting,
            max_context_tokens=answer.max_context_tokens,
            num_tokens=answer.num_tokens,
        )

    async def close(self) -> None:
        """Close the channel; the backend behind it goes on. May be called twice."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _stub(self) -> "rpc.InferenceServiceAsyncStub":
        assert self._channel is not None, "start() comes first"
        return rpc.InferenceServiceStub(self._channel)
