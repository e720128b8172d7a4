"""An inference backend behind gRPC keeps every rule of a local one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from headrace.engine.errors import ActorLostError, DeadlineError, FormatError, UsageError, WeightUpdateError
from headrace.engine.testing.check_inference import InferenceCase, check_inference_backend
from headrace.engine.testing.scripted_inference import ScriptedInferenceBackend
from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.inference import RemoteInferenceBackend, inference_service
from headrace.engine.transport.server import GrpcServer, serving
from headrace.engine.transport.status import error_from_rpc
from headrace.engine.transport.weights_convert import (
    ack_from_proto,
    ack_to_proto,
    manifest_from_proto,
    manifest_to_proto,
    update_from_proto,
    update_to_proto,
)
from headrace.engine.types import (
    AckStatus,
    GenerateRequest,
    PolicyVersion,
    SamplingParams,
    TensorSpec,
    WeightAck,
    WeightUpdate,
)
from headrace.engine.weights.payload import KeyframeWriter
from headrace.v1 import inference_pb2, inference_pb2_grpc, weights_pb2


def keyframe(folder: Path, version: PolicyVersion) -> WeightUpdate:
    path = folder / f"payload-{version}"
    specs = [TensorSpec(name="w", dtype="bfloat16", shape=(2, 3)), TensorSpec(name="s", dtype="float32", shape=())]
    with KeyframeWriter(path, specs, run_id="run", version=version) as writer:
        writer.write(0, 0, np.arange(6, dtype=np.uint16))
        writer.write(1, 0, np.ones(1, np.float32))
        return WeightUpdate(manifest=writer.manifest(), local_path=str(path))


@pytest.fixture
def local() -> ScriptedInferenceBackend:
    return ScriptedInferenceBackend(list(range(1, 400)), tokens_per_s=2000, max_running=3, max_context_tokens=512)


@pytest.fixture
async def server(local: ScriptedInferenceBackend, tmp_path: Path) -> AsyncIterator[GrpcServer]:
    await local.start()
    async with serving([inference_service(local)], f"unix:{tmp_path}/s") as server:
        yield server
    await local.close()


def request(name: str = "r", max_tokens: int = 300) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=(1, 2), sampling=SamplingParams(max_tokens=max_tokens))


async def test_every_rule_of_inference_backends_holds_across_grpc(server: GrpcServer, tmp_path: Path) -> None:
    case = InferenceCase(long_tokens=300, make_update=lambda version: keyframe(tmp_path, version), deltas=True)
    await check_inference_backend(lambda: RemoteInferenceBackend(server.address), case)


async def test_chunks_arrive_as_they_were_sent(server: GrpcServer, local: ScriptedInferenceBackend) -> None:
    remote = RemoteInferenceBackend(server.address)
    await remote.start()
    here = [chunk async for chunk in local.generate(request(max_tokens=5))]
    there = [chunk async for chunk in remote.generate(request(max_tokens=5))]
    assert [(c.token_ids, c.policy_version, c.finish_reason) for c in here] == [
        (c.token_ids, c.policy_version, c.finish_reason) for c in there
    ]
    for one, other in zip(here, there, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-6)
    assert (await remote.state()).num_tokens == (await local.state()).num_tokens
    await remote.close()


async def test_closing_the_iterator_ends_the_sample_on_the_other_side(
    server: GrpcServer, local: ScriptedInferenceBackend
) -> None:
    remote = RemoteInferenceBackend(server.address)
    await remote.start()
    stream = remote.generate(request())
    await anext(stream)
    assert (await local.state()).num_running == 1
    await stream.aclose()
    async with asyncio.timeout(30):
        while (await local.state()).num_running:  # noqa: ASYNC110  # no event tells of it from outside
            await asyncio.sleep(0)
    await remote.close()


async def test_errors_arrive_as_the_class_that_was_raised(server: GrpcServer) -> None:
    remote = RemoteInferenceBackend(server.address)
    await remote.start()
    with pytest.raises(UsageError):
        await anext(remote.generate(request(max_tokens=10_000)))
    ahead = GenerateRequest(
        request_id="a", token_ids=(1,), sampling=SamplingParams(max_tokens=2), min_version=PolicyVersion(9, 9)
    )
    with pytest.raises(WeightUpdateError):
        await anext(remote.generate(ahead))
    await remote.close()


async def test_a_server_that_goes_away_is_a_lost_actor_and_one_that_never_came_a_missed_deadline(
    server: GrpcServer, tmp_path: Path
) -> None:
    remote = RemoteInferenceBackend(server.address)
    await remote.start()
    stream = remote.generate(request())
    await anext(stream)
    await server.stop()
    with pytest.raises(ActorLostError):
        async for _ in stream:
            pass
    await remote.close()
    nobody = RemoteInferenceBackend(f"unix:{tmp_path}/nobody", start_timeout_s=0.2)
    with pytest.raises(DeadlineError, match="nobody"):
        await nobody.start()
    await nobody.close()


async def test_an_unknown_pause_mode_is_refused(server: GrpcServer) -> None:
    async with open_channel(server.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Pause(inference_pb2.PauseRequest())
    assert isinstance(error_from_rpc(caught.value, "pausing"), FormatError)


def test_updates_and_acks_survive_the_wire(tmp_path: Path) -> None:
    update = keyframe(tmp_path, PolicyVersion(2, 7))
    wire = weights_pb2.WeightUpdate.FromString(update_to_proto(update).SerializeToString())
    assert update_from_proto(wire) == update
    ack = WeightAck(
        version=PolicyVersion(2, 6), status=AckStatus.CORRUPT, digest=2**64 - 1, message="m", pause_s=0.5, apply_s=0.25
    )
    assert ack_from_proto(weights_pb2.WeightAck.FromString(ack_to_proto(ack).SerializeToString())) == ack


def test_a_manifest_with_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    wire = manifest_to_proto(keyframe(tmp_path, PolicyVersion(0, 1)).manifest)
    wire.kind = weights_pb2.UPDATE_KIND_UNSPECIFIED
    with pytest.raises(FormatError, match="KEYFRAME"):
        manifest_from_proto(wire)
