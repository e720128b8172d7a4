"""One way to start a gRPC server: health checking, reflection, options and error mapping come with it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace.engine.errors import ConfigError, HeadraceError
from headrace.engine.transport.channel import server_options, target_of
from headrace.engine.transport.status import ERROR_KEY, code_of, message_of

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A servicer and how to add it.

    Attributes:
        name: Full name, e.g. "headrace.v1.RewardService".
        add: Calls the generated `add_...Servicer_to_server` with the servicer.
    """

    name: str
    add: Callable[[grpc.aio.Server], None]


class GrpcServer:
    """A running asyncio gRPC server.

    Each handler is wrapped: a HeadraceError reaches the caller as itself, any other exception as INTERNAL with its
    class name (and the traceback in the log), and a CancelledError that the handler raised of its own is answered too
    instead of leaving the caller without a reply.
    """

    def __init__(self, services: Sequence[Service], address: str) -> None:
        """Prepare a server for `unix:/path`, `grpc://host:port` or `host:port`; port 0 takes a free one."""
        self._services = services
        self._target = target_of(address)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self.address = address

    async def start(self) -> str:
        """Bind and serve; returns the address that clients can use.

        Raises:
            ConfigError: The address is taken or cannot be bound.
        """
        server = grpc.aio.server(interceptors=[_Guard()], options=server_options())
        for service in self._services:
            service.add(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [service.name for service in self._services]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        try:
            port = server.add_insecure_port(self._target)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {self.address}: it is taken or not an address of this host") from error
        await server.start()
        for name in ["", *names]:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._server = server
        if not self._target.startswith("unix:"):
            self.address = f"grpc://{self._target.rpartition(':')[0]}:{port}"
        return self.address

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, then cancel them. May be called twice."""
        server, self._server = self._server, None
        if server is not None:
            await self._health.enter_graceful_shutdown()
            await server.stop(grace_s)

    async def wait(self) -> None:
        """Return when the server has stopped."""
        if self._server is not None:
            await self._server.wait_for_termination()


@contextlib.asynccontextmanager
async def serving(services: Sequence[Service], address: str, *, grace_s: float = 0.0) -> AsyncGenerator[GrpcServer]:
    """Serve within a block; `server.address` is what clients use."""
    server = GrpcServer(services, address)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s)


class _Guard(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server. Streaming handlers must be async generators."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None:  # an unknown method
            return handler
        method = str(handler_call_details.method)
        codec = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_answer(handler.unary_unary, method), *codec)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(_stream(handler.unary_stream, method), *codec)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(_answer(handler.stream_unary, method), *codec)
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(_stream(handler.stream_stream, method), *codec)
        return handler


def _answer(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def handle(request: Any, context: "Context") -> Any:
        try:
            return await behaviour(request, context)
        except BaseException as error:
            await _abort(error, context, method)

    return handle


def _stream(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def handle(request: Any, context: "Context") -> AsyncIterator[Any]:
        try:
            answers = behaviour(request, context)
            if not hasattr(answers, "__aiter__"):  # reflection and health have handlers that write by themselves
                await answers
                return
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    yield answer
        except GeneratorExit:
            raise
        except BaseException as error:
            await _abort(error, context, method)

    return handle


async def _abort(error: BaseException, context: "Context", method: str) -> NoReturn:
    """End the call with a status, or re-raise what must not be swallowed."""
    if isinstance(error, HeadraceError):
        await context.abort(code_of(error), message_of(error), ((ERROR_KEY, type(error).__name__),))
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError):
        if task is None or task.cancelling() > 0 or context.cancelled():
            raise error
        await context.abort(grpc.StatusCode.ABORTED, f"{method}: the work behind this call was cancelled")
    if isinstance(error, (grpc.aio.AbortError, grpc.aio.UsageError, KeyboardInterrupt, SystemExit)):
        raise error
    log.error("%s failed", method, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"{method}: {type(error).__name__}: {error}")
