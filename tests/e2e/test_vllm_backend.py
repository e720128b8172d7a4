"""The vLLM backend against a real vLLM, and against transformers as the judge of its numbers."""

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.actors.rollout.backends import choose_backend
from headrace.engine.config.schema import Config
from headrace.engine.errors import UsageError, WeightUpdateError
from headrace.engine.interfaces import InferenceBackend
from headrace.engine.testing.check_inference import InferenceCase, check_inference_backend
from headrace.engine.testing.delta_samples import (
    damaged_copy,
    flipped_signs,
    make_change_update,
    make_keyframe,
    state_of,
)
from headrace.engine.types import (
    AckStatus,
    FinishReason,
    GenerateRequest,
    PauseMode,
    PolicyVersion,
    SamplingParams,
    TensorSpec,
    TokenChunk,
    UpdateKind,
    WeightUpdate,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
    # Of vLLM itself and of the libraries that it imports.
    pytest.mark.filterwarnings("default"),
]

Engine = Any
PROMPT = tuple(int(token) for token in np.random.default_rng(0).integers(0, 256, 200))


def request(name: str, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=prompt, sampling=SamplingParams(**sampling))


async def collect(stream: AsyncGenerator[TokenChunk]) -> list[TokenChunk]:
    return [chunk async for chunk in stream]


def tokens(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def logprobs(chunks: list[TokenChunk]) -> list[float]:
    return [value for chunk in chunks for value in chunk.logprobs]


def versions(chunks: list[TokenChunk]) -> list[int]:
    return [chunk.policy_version.version for chunk in chunks for _ in chunk.token_ids]


def forward_logprobs(model: Any, prompt: tuple[int, ...], response: list[int], temperature: float) -> np.ndarray:
    import torch

    with torch.no_grad():
        ids = torch.tensor([[*prompt, *response]])
        scores = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature, -1)
        return scores[torch.arange(len(response)), torch.tensor(response)].numpy()


def greedy(model: Any, prompt: tuple[int, ...], length: int) -> list[int]:
    import torch

    ids = list(prompt)
    with torch.no_grad():
        for _ in range(length):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


async def started(
    backend: Any, *requests: GenerateRequest, after: int = 3
) -> tuple[list[asyncio.Task[Any]], list[Any]]:
    """Start each request and return once each has so many tokens."""
    reached = [asyncio.Event() for _ in requests]
    sinks: list[list[TokenChunk]] = [[] for _ in requests]

    async def run(index: int) -> list[TokenChunk]:
        async for chunk in backend.generate(requests[index]):
            sinks[index].append(chunk)
            if len(tokens(sinks[index])) >= after:
                reached[index].set()
        reached[index].set()
        return sinks[index]

    tasks = [asyncio.create_task(run(index)) for index in range(len(requests))]
    for event in reached:
        await event.wait()
    return tasks, sinks


@pytest.mark.parametrize("temperature", [0.6, 1.0])
async def test_temperature_logprobs_are_those_of_a_forward_at_the_sampling_temperature(
    vllm_engine: Engine, temperature: float
) -> None:
    await vllm_engine.serve(0)
    chunks = await collect(vllm_engine.backend.generate(request("k4", temperature=temperature, max_tokens=40, seed=1)))
    expected = forward_logprobs(vllm_engine.model(0), PROMPT, tokens(chunks), temperature)
    np.testing.assert_allclose(logprobs(chunks), expected, atol=2e-3)


async def test_retokenise_ids_come_back_as_sampled_and_extend_the_prompt(vllm_engine: Engine) -> None:
    await vllm_engine.serve(0)
    first = await collect(vllm_engine.backend.generate(request("a", (7, 8, 9), temperature=1.0, max_tokens=6, seed=2)))
    assert len(tokens(first)) == len(logprobs(first)) == 6
    assert first[-1].finish_reason is FinishReason.LENGTH
    # Byte ids of half a character: decoding and encoding again would not give them back.
    second_prompt = (7, 8, 9, *tokens(first), 0xE2, 0x82)
    following = request("b", second_prompt, temperature=1.0, max_tokens=4, seed=3)
    second = await collect(vllm_engine.backend.generate(following))
    expected = forward_logprobs(vllm_engine.model(0), second_prompt, tokens(second), 1.0)
    np.testing.assert_allclose(logprobs(second), expected, atol=2e-3)


async def test_appended_eos_a_stop_token_and_a_stop_string_stay_in_the_ids(vllm_engine: Engine) -> None:
    await vllm_engine.serve(0)
    free = tokens(await collect(vllm_engine.backend.generate(request("free", temperature=0.0, max_tokens=8))))
    by_id = await collect(
        vllm_engine.backend.generate(request("id", temperature=0.0, max_tokens=8, stop_token_ids=(free[3],)))
    )
    assert tokens(by_id) == free[: free.index(free[3]) + 1]
    assert by_id[-1].finish_reason is FinishReason.STOP
    prompt = tuple(b"say: ")
    text = tokens(await collect(vllm_engine.backend.generate(request("t", prompt, temperature=0.0, max_tokens=8))))
    readable = next((i for i, token in enumerate(text) if 33 <= token < 127), None)
    if readable is not None:
        stop = chr(text[readable])
        by_text = await collect(
            vllm_engine.backend.generate(request("s", prompt, temperature=0.0, max_tokens=8, stop=(stop,)))
        )
        assert tokens(by_text) == text[: readable + 1]
        assert by_text[-1].finish_reason is FinishReason.STOP


async def test_after_an_update_greedy_tokens_are_those_of_a_fresh_model_with_the_new_weights(
    vllm_engine: Engine,
) -> None:
    for seed in (1, 0, 2):
        ack = await vllm_engine.serve(seed)
        assert ack.version == PolicyVersion(0, vllm_engine.num_updates)
        chunks = await collect(vllm_engine.backend.generate(request("g", temperature=0.0, max_tokens=12)))
        assert tokens(chunks) == greedy(vllm_engine.model(seed), PROMPT, 12)
        assert set(versions(chunks)) == {vllm_engine.num_updates}


async def test_prefix_cache_of_old_weights_is_not_used_after_an_update(vllm_engine: Engine) -> None:
    await vllm_engine.serve(0)
    for _ in range(2):
        await collect(vllm_engine.backend.generate(request("warm", temperature=0.6, max_tokens=4, seed=1)))
    await vllm_engine.serve(3)
    chunks = await collect(vllm_engine.backend.generate(request("new", temperature=0.6, max_tokens=20, seed=1)))
    expected = forward_logprobs(vllm_engine.model(3), PROMPT, tokens(chunks), 0.6)
    np.testing.assert_allclose(logprobs(chunks), expected, atol=2e-3)


async def test_tied_embeddings_both_ends_show_an_update_that_names_the_embedding_alone(vllm_engine: Engine) -> None:
    update = vllm_engine.update(4)
    names = {spec.name for spec in update.manifest.tensors}
    assert "lm_head.weight" not in names
    assert "model.embed_tokens.weight" in names
    assert (await vllm_engine.backend.apply(update)).status is AckStatus.SERVING
    chunks = await collect(
        vllm_engine.backend.generate(request("t", (1, 2, 3), temperature=1.0, max_tokens=10, seed=1))
    )
    expected = forward_logprobs(vllm_engine.model(4), (1, 2, 3), tokens(chunks), 1.0)
    np.testing.assert_allclose(logprobs(chunks), expected, atol=2e-3)


async def test_version_stamp_changes_exactly_at_the_update_in_flight(vllm_engine: Engine) -> None:
    await vllm_engine.serve(0)
    old = vllm_engine.num_updates
    update = vllm_engine.update(5)
    tasks, _ = await started(vllm_engine.backend, request("v", temperature=1.0, max_tokens=120, seed=1), after=10)
    ack = await vllm_engine.backend.apply(update)
    assert ack.status is AckStatus.SERVING
    assert 0 < ack.apply_s < ack.pause_s < 5
    chunks = await tasks[0]
    stamped = versions(chunks)
    fence = stamped.index(old + 1)
    assert stamped == [old] * fence + [old + 1] * (120 - fence)
    before = forward_logprobs(vllm_engine.model(0), PROMPT, tokens(chunks), 1.0)
    # Old tokens are exactly the old model's; the first new one is not.
    np.testing.assert_allclose(logprobs(chunks)[:fence], before[:fence], atol=2e-3)
    assert abs(logprobs(chunks)[fence] - before[fence]) > 0.01


async def test_label_does_not_abort_twelve_requests_go_on_across_an_update(vllm_engine: Engine) -> None:
    await vllm_engine.serve(0)
    old = vllm_engine.num_updates
    update = vllm_engine.update(1)
    requests = [request(f"r{i}", (i + 1, 2, 3), temperature=1.0, max_tokens=150, seed=i) for i in range(12)]
    tasks, _ = await started(vllm_engine.backend, *requests)
    assert (await vllm_engine.backend.apply(update)).status is AckStatus.SERVING
    for chunks in await asyncio.gather(*tasks):
        assert chunks[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert set(versions(chunks)) <= {old, old + 1}
        assert versions(chunks) == sorted(versions(chunks))
        if chunks[-1].finish_reason is FinishReason.LENGTH:
            assert versions(chunks)[0] == old
            assert versions(chunks)[-1] == old + 1


async def test_a_request_without_a_token_at_the_fence_runs_wholly_under_the_new_version(vllm_engine: Engine) -> None:
    await vllm_engine.serve(0)
    update = vllm_engine.update(2)
    busy = [request(f"b{i}", (i + 1, 2, 3), temperature=1.0, max_tokens=100, seed=i) for i in range(16)]
    tasks, _ = await started(vllm_engine.backend, *busy)
    # All 16 places are taken, so this one waits.
    waiting = asyncio.create_task(collect(vllm_engine.backend.generate(request("w", temperature=0.0, max_tokens=8))))
    ack = await vllm_engine.backend.apply(update)
    assert ack.status is AckStatus.SERVING
    chunks = await waiting
    await asyncio.gather(*tasks)
    assert set(versions(chunks)) == {vllm_engine.num_updates}
    assert tokens(chunks) == greedy(vllm_engine.model(2), PROMPT, 8)


async def test_abort_returns_all_running_and_waiting_requests_with_what_they_have(vllm_engine: Engine) -> None:
    await vllm_engine.serve(0)
    backend = vllm_engine.backend
    tasks, _ = await started(
        backend, *[request(f"r{i}", (i + 1, 2), temperature=1.0, max_tokens=400, seed=i) for i in range(16)]
    )
    late = [
        asyncio.create_task(collect(backend.generate(request(f"l{i}", (9, i), temperature=1.0, max_tokens=400))))
        for i in range(8)
    ]
    while len(backend._streams) < 8 + sum(not task.done() for task in tasks):  # noqa: ASYNC110  # no event tells of it
        await asyncio.sleep(0)
    await backend.pause(PauseMode.ABORT)
    held = asyncio.create_task(collect(backend.generate(request("h", (1,), temperature=1.0, max_tokens=3))))
    async with asyncio.timeout(30):
        running = await asyncio.gather(*tasks)
        waiting = await asyncio.gather(*late)
    for chunks in [*running, *waiting]:
        assert len(tokens(chunks)) == len(logprobs(chunks))
    assert any(chunks[-1].finish_reason is FinishReason.ABORTED for chunks in running)
    # A random model may end early, and a waiting request then takes the place.
    assert any((tokens(chunks), chunks[-1].finish_reason) == ([], FinishReason.ABORTED) for chunks in waiting)
    assert not held.done()
    await backend.resume()
    assert len(tokens(await held)) == 3


async def test_version_on_success_a_refused_update_changes_nothing(vllm_engine: Engine) -> None:
    await vllm_engine.serve(0)
    backend, served = vllm_engine.backend, vllm_engine.num_updates
    before = await collect(backend.generate(request("b", temperature=0.0, max_tokens=8)))
    good = vllm_engine.update(1)
    renamed = tuple(
        msgspec.structs.replace(spec, name=spec.name.replace("norm", "gnome")) for spec in good.manifest.tensors
    )
    cut = vllm_engine.update(1)
    os.truncate(cut.local_path, cut.manifest.payload_bytes // 2)
    flipped = vllm_engine.update(1)
    with open(flipped.local_path, "r+b") as file:
        file.seek(1000)
        file.write(b"\xff\x00\xff\x00")
    refused = {
        AckStatus.CORRUPT: [cut, flipped, msgspec.structs.replace(good, local_path="/nowhere")],
        AckStatus.UNKNOWN_LAYOUT: [relabel(good, renamed), lacking(good)],
        AckStatus.WRONG_BASE: [
            msgspec.structs.replace(
                good,
                manifest=msgspec.structs.replace(good.manifest, kind=UpdateKind.DELTA, base=PolicyVersion(1, served)),
            )
        ],
    }
    for status, updates in refused.items():
        for update in updates:
            ack = await backend.apply(update)
            assert (ack.status, ack.version.version) == (status, served), ack.message
    assert (await backend.state()).policy_version == PolicyVersion(0, served)
    after = await collect(backend.generate(request("a", temperature=0.0, max_tokens=8)))
    # How many tokens come in one chunk is a matter of timing.
    assert (tokens(after), logprobs(after), versions(after)) == (tokens(before), logprobs(before), versions(before))


async def test_a_delta_in_flight_is_served_as_a_full_update_of_the_same_weights_is(
    vllm_engine: Engine, tmp_path: Path
) -> None:
    backend = vllm_engine.backend
    base = vllm_engine.update(0)
    assert (await backend.apply(base)).status is AckStatus.SERVING
    old, new = base.manifest.version, PolicyVersion(0, base.manifest.version.version + 1)
    vllm_engine.num_updates += 1
    state = flipped_signs(state_of(base), share=0.01)
    delta = make_change_update(base, state, new, tmp_path / "delta")
    for _ in range(2):  # cached under the old version
        await collect(backend.generate(request("warm", temperature=0.6, max_tokens=4, seed=1)))
    damaged = await backend.apply(damaged_copy(delta, tmp_path / "damaged"))
    assert (damaged.status, damaged.version, damaged.digest) == (AckStatus.CORRUPT, old, base.manifest.digest)
    running = [request(f"r{i}", (i + 1, 2, 3), temperature=1.0, max_tokens=150, seed=i) for i in range(8)]
    tasks, _ = await started(backend, *running)
    ack = await backend.apply(delta)
    assert (ack.status, ack.version, ack.digest) == (AckStatus.SERVING, new, delta.manifest.digest), ack.message
    assert 0 < ack.apply_s < ack.pause_s < 5
    model = changed_model(vllm_engine, base, state)
    for asked, chunks in zip(running, await asyncio.gather(*tasks), strict=True):
        assert chunks[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        stamped = versions(chunks)
        assert stamped == sorted(stamped)
        assert set(stamped) <= {old.version, new.version}
        num_old = stamped.count(old.version)
        before = forward_logprobs(vllm_engine.model(0), asked.token_ids, tokens(chunks), 1.0)
        np.testing.assert_allclose(logprobs(chunks)[:num_old], before[:num_old], atol=2e-3)
        if num_old < len(stamped):
            assert np.abs(np.array(logprobs(chunks)) - before)[num_old:].max() > 0.01
    assert (await backend.apply(delta)).status is AckStatus.WRONG_BASE
    asked = request("new", temperature=0.6, max_tokens=20, seed=1)
    changed = await collect(backend.generate(asked))
    assert set(versions(changed)) == {new.version}
    np.testing.assert_allclose(logprobs(changed), forward_logprobs(model, PROMPT, tokens(changed), 0.6), atol=2e-3)
    vllm_engine.num_updates += 1
    newest = PolicyVersion(0, vllm_engine.num_updates)
    full = make_keyframe(base, state, newest, tmp_path / "full")
    assert full.manifest.digest == delta.manifest.digest
    assert (await backend.apply(full)).version == newest
    whole = await collect(backend.generate(asked))
    assert set(versions(whole)) == {newest.version}
    assert (tokens(whole), logprobs(whole)) == (tokens(changed), logprobs(changed))


async def test_a_load_that_fails_half_way_stops_serving_until_a_full_update_succeeds(vllm_engine: Engine) -> None:
    await vllm_engine.serve(0)
    backend, served = vllm_engine.backend, vllm_engine.num_updates
    tasks, _ = await started(backend, request("r", temperature=1.0, max_tokens=300, seed=1))
    # The second half alone: to the workers, a load without an update. They answer that it failed.
    ack = await backend._load(vllm_engine.update(1))
    assert (ack.status, ack.version.version) == (AckStatus.FAILED, served)
    assert (await tasks[0])[-1].finish_reason is FinishReason.ABORTED
    with pytest.raises(WeightUpdateError, match="Nothing is served after a failed update"):
        await anext(backend.generate(request("refused", max_tokens=4)))
    await vllm_engine.serve(2)
    chunks = await collect(backend.generate(request("g", (1, 2, 3), temperature=0.0, max_tokens=8)))
    assert tokens(chunks) == greedy(vllm_engine.model(2), (1, 2, 3), 8)


async def test_closing_the_iterator_aborts_the_request(vllm_engine: Engine) -> None:
    backend = vllm_engine.backend
    stream = backend.generate(request("c", temperature=1.0, max_tokens=300))
    await anext(stream)
    await stream.aclose()
    assert (await backend.state()).num_running == 0
    assert backend._engine.get_num_unfinished_requests() == 0


async def test_requests_that_cannot_run_are_refused(vllm_engine: Engine) -> None:
    backend = vllm_engine.backend
    with pytest.raises(UsageError, match="at most 512"):
        await anext(backend.generate(request("long", max_tokens=400)))
    with pytest.raises(UsageError, match="neither may be empty"):
        await anext(backend.generate(request("empty", (), max_tokens=4)))
    future = msgspec.structs.replace(request("future", max_tokens=4), min_version=PolicyVersion(1, 0))
    with pytest.raises(WeightUpdateError, match="needs version 1:0"):
        await anext(backend.generate(future))


class Borrowed:
    """A running backend as one that a check may start and close."""

    def __init__(self, backend: Any) -> None:
        self.generate, self.pause, self.resume = backend.generate, backend.pause, backend.resume
        self.apply, self.state = backend.apply, backend.state

    async def start(self) -> None:
        """It runs."""

    async def close(self) -> None:
        """It goes on."""


async def test_every_rule_of_inference_backends_holds(vllm_engine: Engine) -> None:
    await vllm_engine.serve(0)
    case = InferenceCase(
        prompt=(1, 2, 3),
        long_tokens=300,
        num_requests=20,
        make_update=lambda version: vllm_engine.update(1, version.version),
        deltas=True,
    )
    await check_inference_backend(lambda: Borrowed(vllm_engine.backend), case)
    vllm_engine.num_updates = (await vllm_engine.backend.state()).policy_version.version


async def test_auto_takes_vllm_where_it_imports(vllm_engine: Engine) -> None:
    assert choose_backend(Config()) == ("vllm", "rollout.backend is auto, and vLLM imports")
    assert isinstance(vllm_engine.backend, InferenceBackend)


async def test_vllms_own_weight_transfer_calls_reach_the_same_loader(vllm_engine: Engine) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    from headrace.actors.rollout.vllm_engine import encode_update

    engine = vllm_engine.backend._engine
    await vllm_engine.serve(0)
    update = vllm_engine.update(6)
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.start_weight_update()
    await engine.update_weights(WeightTransferUpdateRequest(update_info={"message": encode_update(update)}))
    await engine.finish_weight_update()
    await engine.resume_generation()
    assert (await engine.collective_rpc("headrace_answer"))[0] == [AckStatus.SERVING, "", update.manifest.digest]
    chunks = await collect(vllm_engine.backend.generate(request("o", (3, 2, 1), temperature=0.0, max_tokens=8)))
    assert tokens(chunks) == greedy(vllm_engine.model(6), (3, 2, 1), 8)


def changed_model(vllm_engine: Engine, base: WeightUpdate, state: list[np.ndarray]) -> Any:
    """The base model with the weights of another state."""
    import torch

    model = vllm_engine.model(0)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for spec, bits in zip(base.manifest.tensors, state, strict=True):
            parameters[spec.name].copy_(torch.from_numpy(bits.view(np.float32)).reshape(spec.shape))
    return model


def relabel(update: WeightUpdate, tensors: tuple[TensorSpec, ...]) -> WeightUpdate:
    from headrace.engine.weights.payload import layout_hash

    manifest = msgspec.structs.replace(update.manifest, tensors=tensors, layout_hash=layout_hash(tensors))
    return msgspec.structs.replace(update, manifest=manifest)


def lacking(update: WeightUpdate) -> WeightUpdate:
    """The same update without its last tensor."""
    from headrace.engine.weights.payload import layout_hash, payload_size

    tensors = update.manifest.tensors[:-1]
    buckets = tuple(b for b in update.manifest.buckets if b.tensor_index < len(tensors))
    size = payload_size(tensors)
    path = update.local_path + "-lacking"
    with open(update.local_path, "rb") as whole, open(path, "wb") as part:
        part.write(whole.read(size))
    manifest = msgspec.structs.replace(
        update.manifest,
        tensors=tensors,
        buckets=buckets,
        layout_hash=layout_hash(tensors),
        payload_bytes=size,
        digest=sum(b.state_checksum for b in buckets) % 2**64,
    )
    return WeightUpdate(manifest=manifest, local_path=path)
