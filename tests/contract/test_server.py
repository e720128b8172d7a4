"""The one way to start a server: health, reflection, typed errors, limits, proxies."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.engine.errors import ActorLostError, BufferFullError, ConfigError, HeadraceError
from headrace.engine.transport.channel import client_options, open_channel, server_options, target_of
from headrace.engine.transport.server import Service, serving
from headrace.engine.transport.status import error_from_rpc
from headrace.v1 import inference_pb2, inference_pb2_grpc, reward_pb2, reward_pb2_grpc


class Awkward(reward_pb2_grpc.RewardServiceServicer):
    """Fails in every way a handler can."""

    async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
        match request.idempotency_key:
            case "full":
                raise BufferFullError("the table 'train' is full")
            case "cancelled":
                raise asyncio.CancelledError
            case "bug":
                raise KeyError("oops")
            case _:
                return reward_pb2.ScoreResponse(
                    outcomes=[reward_pb2.RewardOutcome(sample_id=s.response_text) for s in request.samples]
                )

    async def ScoreStream(self, request: Any, context: Any) -> AsyncIterator[reward_pb2.ScoreStreamResponse]:
        yield reward_pb2.ScoreStreamResponse()
        raise BufferFullError("later")


class Silent(inference_pb2_grpc.InferenceServiceServicer):
    """Remembers whether its stream was ended by the caller."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:
        try:
            while True:
                yield inference_pb2.GenerateResponse(token_ids=[1])
                await asyncio.sleep(0)
        finally:
            self.ended.set()


def reward_service() -> Service:
    return Service(
        name="headrace.v1.RewardService",
        add=lambda server: reward_pb2_grpc.add_RewardServiceServicer_to_server(Awkward(), server),
    )


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    async with serving([reward_service()], f"unix:{tmp_path}/s") as server:
        yield server.address


async def score(address: str, key: str, text: str = "") -> reward_pb2.ScoreResponse:
    async with open_channel(address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        request = reward_pb2.ScoreRequest(idempotency_key=key, samples=[reward_pb2.RewardSample(response_text=text)])
        return await stub.Score(request, timeout=30)


async def failure(address: str, key: str) -> HeadraceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await score(address, key)
    return error_from_rpc(caught.value, "scoring")


async def test_a_typed_error_arrives_as_itself_with_its_message(address: str) -> None:
    error = await failure(address, "full")
    assert type(error) is BufferFullError
    assert str(error) == "the table 'train' is full"


async def test_a_handler_that_raises_cancelled_error_still_answers_its_caller(address: str) -> None:
    assert "was cancelled" in str(await failure(address, "cancelled"))


async def test_a_bug_in_a_handler_is_named_and_the_server_lives_on(address: str) -> None:
    assert "KeyError" in str(await failure(address, "bug"))
    assert len((await score(address, "")).outcomes) == 1


async def test_a_stream_that_fails_after_its_first_message_delivers_both(address: str) -> None:
    async with open_channel(address) as channel:
        call = reward_pb2_grpc.RewardServiceStub(channel).ScoreStream(timeout=30)
        await call.done_writing()
        got = 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                got += 1
    assert got == 1
    assert type(error_from_rpc(caught.value, "x")) is BufferFullError


async def test_message_size(address: str) -> None:
    """K-027: a 6 MiB message passes in both directions; gRPC's own default is 4 MiB on each side."""
    text = "x" * (6 << 20)
    reply = await score(address, "", text)
    assert reply.outcomes[0].sample_id == text


async def test_proxy_env(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K-081: a proxy that points nowhere does not matter on internal channels."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    async with serving([reward_service()], "grpc://127.0.0.1:0") as server:
        assert len((await score(server.address, "")).outcomes) == 1


async def test_health_and_reflection_come_with_every_server(address: str) -> None:
    async with open_channel(address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="headrace.v1.RewardService"), timeout=30
        )
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=30)
        answers = [answer async for answer in call]
    names = {service.name for service in answers[0].list_services_response.service}
    assert "headrace.v1.RewardService" in names


async def test_leaving_a_stream_by_cancelling_the_call_ends_the_handler(tmp_path: Path) -> None:
    silent = Silent()
    service = Service(
        name="headrace.v1.InferenceService",
        add=lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(silent, server),
    )
    async with serving([service], f"unix:{tmp_path}/s") as server, open_channel(server.address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
        async for _ in call:
            break
        call.cancel()
        await asyncio.wait_for(silent.ended.wait(), 30)


async def test_an_unreachable_server_is_an_actor_lost_error(tmp_path: Path) -> None:
    error = await failure(f"unix:{tmp_path}/nobody", "")
    assert isinstance(error, ActorLostError)


async def test_two_servers_on_one_port_are_refused() -> None:
    async with serving([reward_service()], "grpc://127.0.0.1:0") as server:
        with pytest.raises(ConfigError, match="cannot listen"):
            async with serving([reward_service()], server.address):
                pass


@pytest.mark.parametrize("address", ["", "nowhere", "http://x:1", "host:99999", "unix:/" + "x" * 120])
def test_a_malformed_address_names_the_setting(address: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.address"):
        target_of(address, setting="reward.address")


class Waiting(inference_pb2_grpc.InferenceServiceServicer):
    """Holds its stream open and says nothing."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(token_ids=[1])
        await asyncio.Event().wait()


async def test_a_silent_stream_outlives_many_keepalive_pings(tmp_path: Path) -> None:
    """A server that gets more pings than it tolerates hangs up; a misspelt option shows here and nowhere else."""
    server = grpc.aio.server(options=server_options(keepalive_s=0.1))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Waiting(), server)
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s", options=client_options(keepalive_s=0.1)) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
        await call.read()
        with pytest.raises(TimeoutError):
            # gRPC pings at most once a second, and the third ping too many ends the connection.
            await asyncio.wait_for(call.read(), 5)
    await server.stop(0)


def test_client_pings_are_rarer_than_the_server_tolerates() -> None:
    client, server = dict(client_options()), dict(server_options())
    assert int(client["grpc.keepalive_time_ms"]) > int(server["grpc.http2.min_ping_interval_without_data_ms"])
    assert client["grpc.max_receive_message_length"] == server["grpc.max_send_message_length"]
