"""K-007: a pickle in the place of anything that is received is a typed error, and nothing in it is executed."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.actors.learner.checkpoint import CheckpointStore, find_latest
from headrace.actors.learner.sharding import RankGroup
from headrace.actors.learner.trainer_state import TrainerState, load_state, save_state
from headrace.actors.models import load_causal_lm, load_tokenizer
from headrace.actors.rollout.checkpoint import read_config, read_shapes
from headrace.actors.tiny import build_tiny_model
from headrace.clients.run_events import event_from_proto
from headrace.engine.errors import ConfigError, CorruptUpdateError, FormatError, HeadraceError
from headrace.engine.hub.composition import find_resume
from headrace.engine.testing import ScriptedInferenceBackend, ScriptedTrainer
from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.control import joined
from headrace.engine.transport.convert import group_from_proto
from headrace.engine.transport.inference import inference_service
from headrace.engine.transport.reward import SERVICE_NAME, GrpcReward
from headrace.engine.transport.server import Service, serving
from headrace.engine.transport.weights_convert import manifest_to_proto
from headrace.engine.types import AckStatus, PolicyVersion, RewardSample, RewardStatus, TensorSpec, WeightUpdate
from headrace.engine.types.records import RecordHeader
from headrace.engine.weights.keyframe import KeyframeWriter
from headrace.engine.weights.payload import open_payload, verify_payload
from headrace.v1 import buffer_pb2, control_pb2, inference_pb2, inference_pb2_grpc, reward_pb2, trajectory_pb2
from headrace.v1 import buffer_pb2_grpc as buffer_rpc

Header = Callable[..., RecordHeader]


class Bomb:
    """Its reconstruction makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[Bomb]:
    """A bomb that must not have gone off when the test is over."""
    marker = tmp_path / "marker"
    yield Bomb(marker)
    assert not marker.exists()


@pytest.fixture
def payload(bomb: Bomb) -> bytes:
    return pickle.dumps(bomb)


@pytest.fixture
def text(bomb: Bomb) -> str:
    """A pickle that passes where text is asked for."""
    return pickle.dumps(bomb, 0).decode("ascii")


def test_no_pickle_the_bomb_of_these_tests_works(tmp_path: Path) -> None:
    marker = tmp_path / "marker-of-this-test"
    for protocol in (0, pickle.HIGHEST_PROTOCOL):
        pickle.loads(pickle.dumps(Bomb(marker), protocol))
        assert marker.exists()
        marker.unlink()


async def test_no_pickle_as_record_or_column_of_a_buffer(
    start_buffer: Callable[..., Any], record_header: Header, payload: bytes, text: str
) -> None:
    server = start_buffer(check=True)
    async with server.producer() as client:
        rejected = await client.put("train", [(record_header("bad"), payload), (record_header(text), text.encode())])
        assert ["not a record" in one.reason for one in rejected] == [True, True]
    async with open_channel(server.address) as channel:
        stub = buffer_rpc.BufferServiceStub(channel)
        columns = [trajectory_pb2.EncodedColumn(record_id="bad/0/0", name=name, data=payload) for name in ("r", text)]
        reply = await stub.PutColumns(buffer_pb2.PutColumnsRequest(table="train", columns=columns))
        assert len(reply.rejected) == 2
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.PutColumns(buffer_pb2.PutColumnsRequest(table=text))
    assert server.ask("stats")["num_records"] == 0


def keyframe(folder: Path) -> WeightUpdate:
    path = folder / "keyframe.bin"
    spec = TensorSpec(name="w", dtype="float32", shape=(64,))
    with KeyframeWriter(path, [spec], run_id="run", version=PolicyVersion(0, 1)) as writer:
        writer.write(0, 0, np.arange(64, dtype=np.float32))
        return WeightUpdate(manifest=writer.manifest(), local_path=str(path))


async def test_no_pickle_as_weights(tmp_path: Path, payload: bytes) -> None:
    update = keyframe(tmp_path)
    backend = ScriptedInferenceBackend([1, 2, 3])
    await backend.start()
    # As it is, and as long as the payload that the manifest announces.
    for data in (payload, payload[:256].ljust(update.manifest.payload_bytes, b".")):
        Path(update.local_path).write_bytes(data)
        with pytest.raises(CorruptUpdateError):
            verify_payload(update)
        ack = await backend.apply(update)
        assert (ack.status, ack.version) == (AckStatus.CORRUPT, PolicyVersion(0, 0))
    assert open_payload(update)["w"][1].dtype == np.uint32  # numbers, whatever they were meant to be
    await backend.close()


async def test_no_pickle_as_request_of_an_engine(tmp_path: Path, payload: bytes, text: str) -> None:
    backend = ScriptedInferenceBackend([1, 2, 3])
    await backend.start()
    async with (
        serving([inference_service(backend)], f"unix:{tmp_path}/s") as server,
        open_channel(server.address) as channel,
    ):
        for method in ("Pause", "Resume", "Apply", "GetState"):
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(f"/headrace.v1.InferenceService/{method}", None, None)(payload)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(aiter(channel.unary_stream("/headrace.v1.InferenceService/Generate", None, None)(payload)))
        sampling = trajectory_pb2.SamplingParams(max_tokens=2, stop=[text], temperature=1.0)
        request = inference_pb2.GenerateRequest(request_id=text, token_ids=[1], sampling=sampling)
        assert [tokens async for answer in stub.Generate(request) for tokens in answer.token_ids]
        manifest = manifest_to_proto(keyframe(tmp_path).manifest)
        manifest.tensors[0].dtype = text
        apply = inference_pb2.ApplyRequest(update={"manifest": manifest, "local_path": text})
        assert (await stub.Apply(apply)).ack.status == AckStatus.CORRUPT
        assert (await stub.GetState(inference_pb2.GetStateRequest())).policy_version.version == 0
    await backend.close()


@pytest.mark.parametrize("place", ["the whole reply", "sample_id", "message", "metrics"])
async def test_no_pickle_as_reply_of_a_reward_server(place: str, payload: bytes, text: str) -> None:
    def answer(request: reward_pb2.ScoreRequest) -> bytes:
        outcomes = [reward_pb2.RewardOutcome(sample_id=s.sample_id, outcome=1, value=1.0) for s in request.samples]
        match place:
            case "the whole reply":
                return payload
            case "sample_id":
                outcomes[0].sample_id = text
            case "message":
                outcomes[0].message, outcomes[0].outcome = text, reward_pb2.OUTCOME_ERROR
            case _:
                outcomes[0].metrics[text] = 1.0
        return reward_pb2.ScoreResponse(outcomes=outcomes).SerializeToString()

    class Server(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            async def score(request: reward_pb2.ScoreRequest, context: Any) -> bytes:
                return answer(request)

            if details.method.endswith("/Score"):
                return grpc.unary_unary_rpc_method_handler(score, reward_pb2.ScoreRequest.FromString)
            return None

    service = Service(name=SERVICE_NAME, add=lambda server: server.add_generic_rpc_handlers((Server(),)))
    async with serving([service], "127.0.0.1:0") as server:
        reward = GrpcReward(server.address, backoff_s=0.001)
        samples = [RewardSample(sample_id=f"s{index}", response_text=text) for index in range(2)]
        first, second = await reward.score(samples)
        await reward.close()
    if place == "metrics":  # no name of a metric, so it is left out
        assert (first.status, first.metrics) == (RewardStatus.OK, {})
    else:
        assert first.status is RewardStatus.ERROR
    assert second.status is (RewardStatus.ERROR if place == "the whole reply" else RewardStatus.OK)


def test_no_pickle_as_what_the_hub_says(text: str) -> None:
    with pytest.raises(ConfigError):
        joined(control_pb2.JoinResponse(config_toml=text))
    with pytest.raises(FormatError):
        group_from_proto(trajectory_pb2.PromptGroup(prompt={"data_json": text}))
    for message in ({"metrics_json": text}, {"status": {"ended": text}}):
        with pytest.raises(FormatError):
            event_from_proto(control_pb2.WatchResponse(**message))  # type: ignore[arg-type]


@pytest.mark.parametrize("file", ["manifest.json", "hub.json", "scripted-trainer.json"])
def test_no_pickle_as_file_of_a_checkpoint(tmp_path: Path, payload: bytes, file: str) -> None:
    checkpoints = tmp_path / "checkpoints"
    state = {"version": [0, 1], "step": 1, "prompts": {}}
    store = CheckpointStore(checkpoints, keep=2, rank=0)
    path = store.save(ScriptedTrainer(), 1, {"hub.json": msgspec.json.encode(state)})
    assert find_resume(tmp_path).checkpoint == path
    size = (path / file).stat().st_size
    (path / file).write_bytes(payload)
    if file == "manifest.json":
        assert find_latest(checkpoints) is None
        return
    # The manifest agrees with the forged file, so that the file itself is read.
    manifest = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(manifest.replace(b":%d" % size, b":%d" % len(payload)))
    assert find_latest(checkpoints) == path
    with pytest.raises(FormatError):
        find_resume(tmp_path)
        ScriptedTrainer().load(path)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankGroup]:
    group = RankGroup(rank=0, num_ranks=1, init_method=f"file://{tmp_path}/meet", device=torch.device("cpu"))
    yield group
    group.close()


def test_no_pickle_as_file_of_a_trainers_state(tmp_path: Path, payload: bytes, ranks: RankGroup) -> None:
    folder = tmp_path / "state"
    saved = {"w": torch.arange(4.0)}
    save_state(folder, saved, TrainerState(version=1, updates=1), ranks)
    (folder / ".metadata").write_bytes(payload)  # what torch's default storage would read
    loaded = {"w": torch.zeros(4)}
    assert load_state(folder, loaded).version == 1
    assert torch.equal(loaded["w"], saved["w"])
    (tensors,) = folder.glob("*.safetensors")
    tensors.write_bytes(payload)
    state = TrainerState(version=1, updates=1, files={tensors.name: len(payload)})
    (folder / "trainer.json").write_bytes(msgspec.json.encode(state))
    with pytest.raises(FormatError):
        load_state(folder, loaded)
    (folder / "trainer.json").write_bytes(payload)
    with pytest.raises(FormatError):
        load_state(folder, loaded)


def test_no_pickle_as_file_of_a_model(tmp_path: Path, payload: bytes) -> None:
    folder = build_tiny_model(tmp_path / "model")
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(payload)
    with pytest.raises(HeadraceError):
        read_shapes(folder)
    with pytest.raises(ConfigError):
        load_causal_lm(folder)
    weights.unlink()
    (folder / "pytorch_model.bin").write_bytes(payload)
    with pytest.raises(ConfigError):
        load_causal_lm(folder)
    with pytest.raises(ConfigError):
        read_shapes(folder)
    (folder / "tokenizer.json").write_bytes(payload)
    with pytest.raises(ConfigError):
        load_tokenizer(folder)
    (folder / "config.json").write_bytes(payload)
    with pytest.raises(ConfigError):
        read_config(folder)


@pytest.mark.parametrize(
    "header", [b"[1, 2]", b'{"w": 3}', b'{"w": {}}', b"[" * 100_000, b"\xff{}", b'{"w": {"shape": "x"}}']
)
def test_a_safetensors_header_of_another_form_is_a_format_error(tmp_path: Path, header: bytes) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(FormatError, match="not a safetensors file"):
        read_shapes(tmp_path)
