"""The scripted backend keeps every rule of a backend, and the check finds those that do not."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.engine.errors import ActorLostError, InputError, UsageError, WeightUpdateError
from headrace.engine.interfaces import InferenceBackend
from headrace.engine.testing import (
    FakeClock,
    FixedLength,
    InferenceCase,
    LogNormalLengths,
    ScriptedInferenceBackend,
    ScriptedTrainer,
    check_inference_backend,
    random_script,
)
from headrace.engine.types import (
    AckStatus,
    FinishReason,
    GenerateRequest,
    PauseMode,
    PolicyVersion,
    SamplingParams,
    TokenChunk,
    UpdateKind,
    WeightAck,
    WeightUpdate,
)


def _updates(folder: Path) -> Callable[[PolicyVersion], WeightUpdate]:
    return lambda version: ScriptedTrainer(version=version).export_update(None, folder)


def _request(name: str = "r", max_tokens: int = 64, **changes: PolicyVersion) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(request_id=name, token_ids=(1, 2), sampling=sampling, **changes)


async def _started(**settings: object) -> ScriptedInferenceBackend:
    backend = ScriptedInferenceBackend(**settings)  # type: ignore[arg-type]
    await backend.start()
    return backend


async def _read(chunks: AsyncGenerator[TokenChunk, None]) -> list[TokenChunk]:
    return [chunk async for chunk in chunks]


def _long_script(**settings: object) -> ScriptedInferenceBackend:
    return ScriptedInferenceBackend(random_script(FixedLength(num_tokens=64)), max_running=2, **settings)  # type: ignore[arg-type]


async def test_the_scripted_backend_conforms(tmp_path: Path) -> None:
    case = InferenceCase(make_update=_updates(tmp_path), deltas=True, quiet_s=0.01, timeout_s=5)
    await check_inference_backend(_long_script, case)
    await check_inference_backend(lambda: _long_script(tokens_per_s=20_000.0, tokens_per_chunk=3, apply_s=0.01), case)


class _ForgetsWaiting(ScriptedInferenceBackend):
    """An abort reaches the running requests alone."""

    async def pause(self, mode: PauseMode) -> None:
        await super().pause(PauseMode.KEEP)
        if mode is PauseMode.ABORT:
            self._slots.abort_all()
            for state in list(self._slots._queue):
                state.aborted = False


class _StampsTheStart(ScriptedInferenceBackend):
    """Every token carries the version at which its request began."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        began = self._served.version
        async for chunk in super().generate(request):
            yield msgspec.structs.replace(chunk, policy_version=began)


class _BreaksOnBadUpdates(ScriptedInferenceBackend):
    async def apply(self, update: WeightUpdate) -> WeightAck:
        ack = await super().apply(update)
        if ack.status is not AckStatus.SERVING:
            raise RuntimeError(ack.message)
        return ack


class _MovesTheVersionFirst(ScriptedInferenceBackend):
    async def apply(self, update: WeightUpdate) -> WeightAck:
        ack = await super().apply(update)
        self._served = dataclasses.replace(self._served, version=update.manifest.version)
        return ack


class _TakesAnyBase(ScriptedInferenceBackend):
    async def apply(self, update: WeightUpdate) -> WeightAck:
        far = update.manifest.base is not None and update.manifest.base > self._served.version
        if update.manifest.base is not None and not far:
            self._served = dataclasses.replace(self._served, version=update.manifest.base)
        return await super().apply(update)


class _TakesNoDeltas(ScriptedInferenceBackend):
    async def apply(self, update: WeightUpdate) -> WeightAck:
        if update.manifest.kind is UpdateKind.DELTA:
            return WeightAck(version=self._served.version, status=AckStatus.UNKNOWN_LAYOUT)
        return await super().apply(update)


class _IgnoresMinVersion(ScriptedInferenceBackend):
    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        return super().generate(msgspec.structs.replace(request, min_version=PolicyVersion(0, 0)))


class _KeepsGenerating(ScriptedInferenceBackend):
    async def pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.ABORT:
            await super().pause(mode)


class _LeaksCancelled(ScriptedInferenceBackend):
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        chunks = super().generate(request)
        try:
            async for chunk in chunks:
                yield chunk
        except (GeneratorExit, asyncio.CancelledError):
            self._slots.num_running += 1
            raise


class _LosesLogprobs(ScriptedInferenceBackend):
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        async for chunk in super().generate(request):
            yield msgspec.structs.replace(chunk, logprobs=chunk.logprobs[1:])


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (_ForgetsWaiting, "answer every caller; 3 of 5"),
        (_StampsTheStart, "new version"),
        (_BreaksOnBadUpdates, "must not raise; RuntimeError"),
        (_MovesTheVersionFirst, "the old version must be served"),
        (_TakesAnyBase, "from an old base must be WRONG_BASE"),
        (_TakesNoDeltas, "must be acknowledged as SERVING, not UNKNOWN_LAYOUT"),
        (_IgnoresMinVersion, "must raise WeightUpdateError"),
        (_KeepsGenerating, "between pause and resume"),
        (_LeaksCancelled, "must free the request"),
        (_LosesLogprobs, "as many log-probabilities as tokens"),
    ],
)
async def test_the_check_finds_a_broken_backend(
    broken: type[ScriptedInferenceBackend], sentence: str, tmp_path: Path
) -> None:
    def factory() -> InferenceBackend:
        return broken(random_script(FixedLength(num_tokens=64)), max_running=2)

    case = InferenceCase(make_update=_updates(tmp_path), deltas=True, quiet_s=0.01, timeout_s=0.2)
    with pytest.raises(AssertionError, match=sentence):
        await check_inference_backend(factory, case)


async def test_equal_seeds_give_equal_samples_in_any_order() -> None:
    one, other = await _started(seed=5), await _started(seed=5)
    requests = [_request(name) for name in "abc"]
    first = {r.request_id: await _read(one.generate(r)) for r in requests}
    second = {r.request_id: await _read(other.generate(r)) for r in reversed(requests)}
    assert first == second
    assert first["a"] != first["b"]
    different = await _read((await _started(seed=6)).generate(requests[0]))
    assert different != first["a"]


async def test_a_script_is_cut_by_stop_tokens_and_max_tokens() -> None:
    backend = await _started(script=[5, 6, 7, 8])
    stop = SamplingParams(stop_token_ids=(6,), max_tokens=10)
    cases = [
        (SamplingParams(max_tokens=10), (5, 6, 7, 8), FinishReason.STOP),
        (SamplingParams(max_tokens=4), (5, 6, 7, 8), FinishReason.STOP),
        (SamplingParams(max_tokens=3), (5, 6, 7), FinishReason.LENGTH),
        (stop, (5, 6), FinishReason.STOP),
    ]
    for sampling, tokens, reason in cases:
        request = GenerateRequest(request_id="r", token_ids=(1,), sampling=sampling)
        chunks = await _read(backend.generate(request))
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == tokens
        assert chunks[-1].finish_reason is reason


async def test_version_stamp_the_span_changes_exactly_where_the_update_lands(tmp_path: Path) -> None:
    clock = FakeClock()
    backend = await _started(
        script=range(100, 150),
        tokens_per_s=10.0,
        version=PolicyVersion(0, 3),
        clock=clock,
        sleep=clock.sleep,
        apply_s=5.0,
    )
    update = _updates(tmp_path)(PolicyVersion(0, 4))
    reading = asyncio.create_task(_read(backend.generate(_request())))
    await clock.run_for(3.05)
    applying = asyncio.create_task(backend.apply(update))
    await clock.run_for(5.0)
    ack = await applying
    await clock.run_for(2.1)
    chunks = await reading
    versions = [chunk.policy_version.version for chunk in chunks for _ in chunk.token_ids]
    assert versions == [3] * 30 + [4] * 20
    assert (ack.status, ack.version, ack.pause_s) == (AckStatus.SERVING, PolicyVersion(0, 4), pytest.approx(5.0))


async def test_abort_returns_all_even_out_of_the_middle_of_a_sleep() -> None:
    clock = FakeClock()
    backend = await _started(script=range(1, 51), tokens_per_s=1.0, max_running=2, clock=clock, sleep=clock.sleep)
    readings = [asyncio.create_task(_read(backend.generate(_request(str(index))))) for index in range(5)]
    await clock.run_for(3.5)
    state = await backend.state()
    assert (state.num_running, state.num_waiting, state.num_tokens) == (2, 3, 6)
    await backend.pause(PauseMode.ABORT)
    ended = await asyncio.gather(*readings)  # the clock stands still
    assert [sum(len(c.token_ids) for c in chunks) for chunks in ended] == [3, 3, 0, 0, 0]
    assert {chunks[-1].finish_reason for chunks in ended} == {FinishReason.ABORTED}
    state = await backend.state()
    assert (state.num_running, state.num_waiting) == (0, 0)


async def test_slots_go_to_requests_in_the_order_they_came() -> None:
    backend = await _started(max_running=1)
    order: list[str] = []

    async def run(name: str) -> None:
        await _read(backend.generate(_request(name)))
        order.append(name)

    tasks = [asyncio.create_task(run(name)) for name in "abcd"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "c", "d"]


async def test_an_injected_failure_and_another_layout_leave_the_old_version(tmp_path: Path) -> None:
    backend = await _started()
    first = await backend.apply(_updates(tmp_path)(PolicyVersion(0, 1)))
    assert first.status is AckStatus.SERVING
    backend.fail_next_apply("out of memory")
    failed = await backend.apply(_updates(tmp_path)(PolicyVersion(0, 2)))
    assert (failed.status, failed.message, failed.version) == (AckStatus.FAILED, "out of memory", PolicyVersion(0, 1))
    other = ScriptedTrainer(num_weights=9, version=PolicyVersion(0, 5)).export_update(None, tmp_path)
    refused = await backend.apply(other)
    assert (refused.status, refused.version) == (AckStatus.UNKNOWN_LAYOUT, PolicyVersion(0, 1))
    assert refused.digest == first.digest


async def test_misuse_is_answered_with_typed_errors() -> None:
    backend = ScriptedInferenceBackend(max_context_tokens=10)
    with pytest.raises(UsageError, match="not been started"):
        await anext(backend.generate(_request()))
    await backend.start()
    with pytest.raises(UsageError, match="started twice"):
        await backend.start()
    with pytest.raises(InputError, match="take 66 tokens; the context has 10"):
        await anext(backend.generate(_request()))
    with pytest.raises(WeightUpdateError, match="0 is served"):
        await anext(backend.generate(_request(min_version=PolicyVersion(0, 1))))
    await backend.close()
    with pytest.raises(ActorLostError, match="closed"):
        await anext(backend.generate(_request()))


def test_lognormal_lengths_have_the_median_and_are_cut() -> None:
    lengths = LogNormalLengths(median=100, sigma=1.0, longest=500)
    rng = np.random.default_rng(0)
    drawn = [lengths(rng) for _ in range(2000)]
    assert 90 < np.median(drawn) < 110
    assert max(drawn) == 500
    assert min(drawn) >= 1
