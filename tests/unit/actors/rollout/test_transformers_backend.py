"""The transformers backend as a whole: the rules of every backend, and updates in flight."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.actors.rollout.transformers_backend import TransformersBackend
from headrace.actors.tiny import build_tiny_model
from headrace.engine.config.schema import Config, ModelConfig, RolloutConfig
from headrace.engine.errors import ActorLostError, ConfigError, UsageError
from headrace.engine.testing.check_inference import InferenceCase, check_inference_backend
from headrace.engine.testing.delta_samples import flipped_signs, make_change_update, make_keyframe, state_of
from headrace.engine.types import (
    AckStatus,
    FinishReason,
    GenerateRequest,
    PolicyVersion,
    SamplingParams,
    TensorSpec,
    TokenChunk,
    WeightUpdate,
)
from headrace.engine.weights.payload import KeyframeWriter

PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one tied architecture."""
    root = tmp_path_factory.mktemp("tiny")
    for seed in (0, 1):
        build_tiny_model(root / str(seed), "qwen2", seed=seed)
    return root


def config(folder: Path, **model: Any) -> Config:
    return Config(
        model=ModelConfig(**({"path": str(folder / "0"), "dtype": "float32", "max_context_tokens": 256} | model)),
        rollout=RolloutConfig(max_num_seqs=3, threads=1),
    )


def backend_of(folder: Path) -> TransformersBackend:
    return TransformersBackend.from_config(config(folder), folder / "0", version=PolicyVersion(0, 0))


def load(folder: Path, seed: int) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / str(seed), dtype=torch.float32).eval()


def update_of(folder: Path, target: Path, version: PolicyVersion, seed: int = 1) -> WeightUpdate:
    named = [(name, value.detach().numpy()) for name, value in load(folder, seed).named_parameters()]
    specs = [TensorSpec(name=name, dtype="float32", shape=value.shape) for name, value in named]
    path = target / f"{version}-{len(list(target.iterdir()))}"
    with KeyframeWriter(path, specs, run_id="run", version=version) as writer:
        for index, (_, value) in enumerate(named):
            writer.write(index, 0, np.ascontiguousarray(value))
        return WeightUpdate(manifest=writer.manifest(), local_path=str(path))


def request(name: str, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=PROMPT, sampling=SamplingParams(**sampling))


async def collect(stream: AsyncGenerator[TokenChunk]) -> list[TokenChunk]:
    return [chunk async for chunk in stream]


async def test_every_rule_of_inference_backends_holds(folder: Path, tmp_path: Path) -> None:
    case = InferenceCase(long_tokens=200, make_update=lambda version: update_of(folder, tmp_path, version), deltas=True)
    await check_inference_backend(lambda: backend_of(folder), case)


async def test_version_stamp_tokens_of_an_update_in_flight_are_the_right_models(folder: Path, tmp_path: Path) -> None:
    backend = backend_of(folder)
    await backend.start()
    stream = backend.generate(request("r", max_tokens=60, seed=1))
    chunks = [await anext(stream) for _ in range(30)]
    ack = await backend.apply(update_of(folder, tmp_path, PolicyVersion(0, 4)))
    assert ack.status is AckStatus.SERVING
    chunks += await collect(stream)
    await backend.close()
    versions = [chunk.policy_version.version for chunk in chunks]
    fence = versions.index(4)
    assert fence >= 30
    assert versions == [0] * fence + [4] * (60 - fence)
    tokens = [chunk.token_ids[0] for chunk in chunks]
    with torch.no_grad():
        logits = load(folder, 0)(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    old = torch.log_softmax(logits, -1)[torch.arange(60), torch.tensor(tokens)].numpy()
    given = np.array([chunk.logprobs[0] for chunk in chunks])
    np.testing.assert_allclose(given[:fence], old[:fence], atol=1e-3)
    assert abs(given[fence] - old[fence]) > 1e-2


async def test_tied_embeddings_after_an_update_greedy_tokens_are_those_of_the_new_model(
    folder: Path, tmp_path: Path
) -> None:
    backend = backend_of(folder)
    await backend.start()
    update = update_of(folder, tmp_path, PolicyVersion(0, 1))
    assert "lm_head.weight" not in {spec.name for spec in update.manifest.tensors}
    ack = await backend.apply(update)
    assert (ack.status, ack.digest) == (AckStatus.SERVING, update.manifest.digest)
    chunks = await collect(backend.generate(request("g", temperature=0.0, max_tokens=10)))
    await backend.close()
    expected = load(folder, 1).generate(torch.tensor([PROMPT]), max_new_tokens=10, do_sample=False)
    assert [chunk.token_ids[0] for chunk in chunks] == expected[0, len(PROMPT) :].tolist()


async def test_a_delta_in_flight_gives_what_a_full_update_gives_and_moves_the_version_there(
    folder: Path, tmp_path: Path
) -> None:
    changed, whole = backend_of(folder), backend_of(folder)
    base = update_of(folder, tmp_path, PolicyVersion(0, 1))
    state = flipped_signs(state_of(base))
    delta = make_change_update(base, state, PolicyVersion(0, 2), tmp_path / "delta")
    full = make_keyframe(base, state, PolicyVersion(0, 2), tmp_path / "full")
    for backend in (changed, whole):  # transformers loads one model of a process at a time
        await backend.start()
    assert (await changed.apply(base)).status is AckStatus.SERVING
    stream = changed.generate(request("r", max_tokens=60, seed=1))
    chunks = [await anext(stream) for _ in range(10)]
    acks = await changed.apply(delta), await whole.apply(full)
    assert {(ack.status, ack.version, ack.digest) for ack in acks} == {
        (AckStatus.SERVING, PolicyVersion(0, 2), full.manifest.digest)
    }
    chunks += await collect(stream)
    versions = [chunk.policy_version.version for chunk in chunks]
    fence = versions.index(2)
    assert versions == [1] * fence + [2] * (60 - fence)
    asked = request("same", max_tokens=20, seed=2)
    assert await collect(changed.generate(asked)) == await collect(whole.generate(asked))
    await changed.close()
    await whole.close()


async def test_version_on_success_an_unknown_layout_changes_nothing(folder: Path, tmp_path: Path) -> None:
    backend = backend_of(folder)
    await backend.start()
    before = await collect(backend.generate(request("b", temperature=0.0, max_tokens=5)))
    spec = TensorSpec(name="model.norm.weight", dtype="float32", shape=(4,))
    with KeyframeWriter(tmp_path / "k", [spec], run_id="run", version=PolicyVersion(0, 1)) as writer:
        writer.write(0, 0, np.zeros(4, np.float32))
        update = WeightUpdate(manifest=writer.manifest(), local_path=str(tmp_path / "k"))
    ack = await backend.apply(update)
    assert (ack.status, ack.version) == (AckStatus.UNKNOWN_LAYOUT, PolicyVersion(0, 0))
    assert await collect(backend.generate(request("a", temperature=0.0, max_tokens=5))) == before
    await backend.close()


async def test_stop_strings_need_a_tokenizer_and_end_the_sample_with_it(folder: Path) -> None:
    backend = backend_of(folder)
    await backend.start()
    free = await collect(backend.generate(request("f", seed=3, max_tokens=30)))
    tokens = [chunk.token_ids[0] for chunk in free]
    at = next(index for index, token in enumerate(tokens) if 33 <= token < 127)
    cut = await collect(backend.generate(request("s", seed=3, max_tokens=30, stop=(chr(tokens[at]),))))
    await backend.close()
    assert [chunk.token_ids[0] for chunk in cut] == tokens[: at + 1]
    assert cut[-1].finish_reason is FinishReason.STOP


async def test_the_event_loop_runs_while_the_model_generates(folder: Path) -> None:
    backend = backend_of(folder)
    await backend.start()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count())
    chunks = await collect(backend.generate(request("r", max_tokens=20)))
    counter.cancel()
    await backend.close()
    assert turns > len(chunks)


async def test_a_closed_backend_refuses_and_answers_who_waits(folder: Path) -> None:
    backend = backend_of(folder)
    await backend.start()
    reading = asyncio.create_task(collect(backend.generate(request("r", max_tokens=240))))
    while not (await backend.state()).num_running:  # noqa: ASYNC110  # no event tells of it from outside
        await asyncio.sleep(0)
    await backend.close()
    assert (await reading)[-1].finish_reason is FinishReason.ABORTED
    with pytest.raises(ActorLostError, match="closed"):
        await anext(backend.generate(request("late", max_tokens=2)))


async def test_requests_that_cannot_run_are_refused_before_they_are_queued(folder: Path) -> None:
    backend = backend_of(folder)
    for wrong in (
        request("long", max_tokens=254),
        request("none", max_tokens=0),
        msgspec.structs.replace(request("empty"), token_ids=()),
    ):
        with pytest.raises(UsageError, match="at most 256"):
            await anext(backend.generate(wrong))


def test_a_context_that_the_model_does_not_reach_is_a_configuration_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.max_context_tokens is 100000"):
        TransformersBackend.from_config(
            config(folder, max_context_tokens=100_000), folder / "0", version=PolicyVersion(0, 0)
        )
