"""Conformance of an `InferenceBackend`."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from headrace.engine.errors import UsageError, WeightUpdateError
from headrace.engine.interfaces import InferenceBackend
from headrace.engine.testing.expect import expect, until, within
from headrace.engine.types import (
    AckStatus,
    FinishReason,
    GenerateRequest,
    PauseMode,
    PolicyVersion,
    SamplingParams,
    TokenChunk,
    UpdateKind,
    WeightUpdate,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceCase:
    """What the check needs to know of a backend.

    Attributes:
        prompt: Token ids that the model takes.
        long_tokens: `max_tokens` of requests that must still run when they are paused; the backend must not be done
            with them before the check has read one chunk and called the next method.
        make_update: A good update to a version, for the backend's own model; None leaves out what needs updates.
        num_requests: At once; give the backend fewer slots than that, so that some wait.
        timeout_s: For each single wait.
        quiet_s: How long the check listens to be sure that nothing comes.
    """

    prompt: tuple[int, ...] = (1, 2, 3)
    long_tokens: int = 64
    make_update: Callable[[PolicyVersion], WeightUpdate] | None = None
    num_requests: int = 5
    timeout_s: float = 60.0
    quiet_s: float = 0.05

    def request(self, name: str, max_tokens: int | None = None, **changes: PolicyVersion) -> GenerateRequest:
        """A request of `long_tokens` unless told otherwise."""
        sampling = SamplingParams(max_tokens=max_tokens or self.long_tokens, seed=7)
        return GenerateRequest(request_id=name, token_ids=self.prompt, sampling=sampling, **changes)


async def check_inference_backend(factory: Callable[[], InferenceBackend], case: InferenceCase | None = None) -> None:
    """Run every rule of `InferenceBackend` against one backend, from start to close.

    Waits as long as the backend generates. Cancelling closes the backend.

    Args:
        factory: Makes a backend that is not started; called once.
        case: What to ask of it; the default suits scripted backends.

    Raises:
        AssertionError: With one sentence on the first rule that is broken.
    """
    case = case or InferenceCase()
    backend = factory()
    await within(backend.start(), case.timeout_s, "start() must return")
    try:
        await _check_stream(backend, case)
        await _check_refusals(backend, case)
        await _check_cancel_frees(backend, case)
        await _check_keep(backend, case)
        await _check_abort_returns_all(backend, case)
        if case.make_update is not None:
            await _check_apply(backend, case, case.make_update)
            await _check_failed_apply(backend, case, case.make_update)
    finally:
        await within(backend.close(), case.timeout_s, "close() must return")
    await within(backend.close(), case.timeout_s, "a second close() must return")


async def _read(chunks: AsyncGenerator[TokenChunk, None], case: InferenceCase, what: str) -> list[TokenChunk]:
    """All remaining chunks, with the rules that hold for every stream."""

    async def collect() -> list[TokenChunk]:
        return [chunk async for chunk in chunks]

    read = await within(collect(), case.timeout_s, f"{what} must end with a last chunk")
    expect(bool(read), f"{what} must have a last chunk")
    for position, chunk in enumerate(read):
        last = position == len(read) - 1
        ended = chunk.finish_reason is not FinishReason.NONE
        expect(ended == last, f"{what} must have a finish reason on its last chunk and on no other")
        expect(
            len(chunk.token_ids) == len(chunk.logprobs),
            f"{what} must have as many log-probabilities as tokens in each chunk",
        )
        fine = all(math.isfinite(value) and value <= 1e-3 for value in chunk.logprobs)
        expect(fine, f"{what} must have finite log-probabilities of at most 0")
    return read


async def _first(chunks: AsyncGenerator[TokenChunk, None], case: InferenceCase, what: str) -> TokenChunk:
    chunk = await within(anext(chunks), case.timeout_s, f"{what} must begin")
    expect(chunk.finish_reason is FinishReason.NONE, f"{what} must not end with its first chunk; raise long_tokens")
    return chunk


def _num_tokens(chunks: Sequence[TokenChunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)


async def _check_stream(backend: InferenceBackend, case: InferenceCase) -> None:
    version = (await backend.state()).policy_version
    chunks = await _read(backend.generate(case.request("stream", 4)), case, "a short sample")
    expect(1 <= _num_tokens(chunks) <= 4, "a sample must have at least one token and at most max_tokens")
    if _num_tokens(chunks) == 4:
        known = chunks[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    else:
        known = chunks[-1].finish_reason is FinishReason.STOP
    expect(known, "a sample shorter than max_tokens must end with STOP, one of max_tokens with LENGTH or STOP")
    expect(all(chunk.policy_version == version for chunk in chunks), "chunks must carry the version that state() tells")


async def _check_refusals(backend: InferenceBackend, case: InferenceCase) -> None:
    state = await backend.state()
    ahead = PolicyVersion(state.policy_version.incarnation, state.policy_version.version + 1)
    await _expect_refusal(
        backend,
        case.request("ahead", min_version=ahead),
        WeightUpdateError,
        case,
        "a request whose min_version is not served yet must raise WeightUpdateError",
    )
    if state.max_context_tokens:
        await _expect_refusal(
            backend,
            case.request("long", state.max_context_tokens),
            UsageError,
            case,
            "a request that does not fit the context must raise UsageError",
        )


async def _expect_refusal(
    backend: InferenceBackend, request: GenerateRequest, kind: type[Exception], case: InferenceCase, sentence: str
) -> None:
    async with contextlib.aclosing(backend.generate(request)) as chunks:
        try:
            await within(anext(chunks), case.timeout_s, sentence)
        except kind:
            return
    raise AssertionError(sentence)


async def _check_cancel_frees(backend: InferenceBackend, case: InferenceCase) -> None:
    chunks = backend.generate(case.request("closed"))
    await _first(chunks, case, "a sample")
    await within(chunks.aclose(), case.timeout_s, "closing a generator must return")
    reading = asyncio.ensure_future(_read(backend.generate(case.request("cancelled")), case, "a sample"))
    await until(_busy(backend), case.timeout_s, "a request that is read must show in state()")
    reading.cancel()
    await asyncio.wait({reading})
    await until(_idle(backend), case.timeout_s, "closing a generator or cancelling its reader must free the request")


def _idle(backend: InferenceBackend) -> Callable[[], Awaitable[bool]]:
    async def idle() -> bool:
        state = await backend.state()
        return state.num_running == 0 and state.num_waiting == 0

    return idle


def _busy(backend: InferenceBackend) -> Callable[[], Awaitable[bool]]:
    async def busy() -> bool:
        state = await backend.state()
        return state.num_running + state.num_waiting > 0

    return busy


async def _check_keep(backend: InferenceBackend, case: InferenceCase) -> None:
    chunks = backend.generate(case.request("kept"))
    first = await _first(chunks, case, "a sample")
    await within(backend.pause(PauseMode.KEEP), case.timeout_s, "pause(KEEP) must return")
    reading = asyncio.ensure_future(_read(chunks, case, "a kept sample"))
    await asyncio.wait({reading}, timeout=case.quiet_s)
    expect(not reading.done(), "no request may go on between pause and resume; raise long_tokens if it was done before")
    before = (await backend.state()).num_tokens
    await asyncio.wait({reading}, timeout=case.quiet_s)
    expect((await backend.state()).num_tokens == before, "no token may be produced between pause and resume")
    await within(backend.resume(), case.timeout_s, "resume() must return")
    await within(backend.resume(), case.timeout_s, "resume() must be harmless when not paused")
    rest = await reading
    expect(rest[-1].finish_reason is not FinishReason.ABORTED, "a request must go on after pause(KEEP) and resume()")
    total = _num_tokens([first, *rest])
    expect(total <= case.long_tokens, "a kept request must not get more than max_tokens in all")


async def _check_abort_returns_all(backend: InferenceBackend, case: InferenceCase) -> None:
    """Abort and pause answer every waiting caller; new requests are held until resume."""
    streams = [backend.generate(case.request(f"aborted-{index}")) for index in range(case.num_requests)]
    readings = [asyncio.ensure_future(_read(stream, case, "an aborted sample")) for stream in streams]
    await until(_all_inside(backend, case.num_requests), case.timeout_s, "requests that are read must show in state()")
    await within(backend.pause(PauseMode.ABORT), case.timeout_s, "pause(ABORT) must return")
    done, waiting = await asyncio.wait(readings, timeout=0.8 * case.timeout_s)  # before their own limit
    for reading in waiting:
        reading.cancel()
    expect(not waiting, f"pause(ABORT) must answer every caller; {len(waiting)} of {len(readings)} got no answer")
    ends = [(await reading)[-1].finish_reason for reading in done]
    expect(FinishReason.ABORTED in ends, "a request that pause(ABORT) ended must have the finish reason ABORTED")
    held = asyncio.ensure_future(_read(backend.generate(case.request("held", 4)), case, "a sample sent while paused"))
    await asyncio.wait({held}, timeout=case.quiet_s)
    expect(not held.done(), "a request that comes between pause and resume must be held until resume")
    await within(backend.resume(), case.timeout_s, "resume() must return")
    expect(
        (await held)[-1].finish_reason is not FinishReason.ABORTED, "a request held by a pause must run after resume"
    )


def _all_inside(backend: InferenceBackend, num_requests: int) -> Callable[[], Awaitable[bool]]:
    async def inside() -> bool:
        state = await backend.state()
        return state.num_running + state.num_waiting >= num_requests

    return inside


async def _check_apply(
    backend: InferenceBackend, case: InferenceCase, make_update: Callable[[PolicyVersion], WeightUpdate]
) -> None:
    state = await backend.state()
    old = state.policy_version
    new = PolicyVersion(old.incarnation, old.version + 1)
    chunks = backend.generate(case.request("across"))
    first = await _first(chunks, case, "a sample")
    produced = (await backend.state()).num_tokens - state.num_tokens
    expect(first.policy_version == old, "tokens produced before an update must carry the old version")
    ack = await within(backend.apply(make_update(new)), case.timeout_s, "apply() must return while requests run")
    expect(ack.status is AckStatus.SERVING, f"a good update must be acknowledged as SERVING, not {ack.status.name}")
    expect(ack.version == new, "the ack of a good update must name the update's version")
    expect((await backend.state()).policy_version == new, "state() must tell the new version once apply() has returned")
    rest = await _read(chunks, case, "a sample across an update")
    versions = [chunk.policy_version for chunk in rest]
    expect(versions == sorted(versions), "versions must not go back within a sample")
    expect(set(versions) <= {old, new}, "a token must carry the version that was served when it was produced")
    num_old = _num_tokens([chunk for chunk in [first, *rest] if chunk.policy_version == old])
    expect(num_old >= produced, "a token must carry the version that was served when it was produced, not delivered")
    expect(rest[-1].finish_reason is not FinishReason.ABORTED, "an update must not abort a running request")
    expect(versions[-1] == new, "tokens produced after an update must carry the new version")
    fresh = await _read(backend.generate(case.request("fresh", 4, min_version=new)), case, "a sample after an update")
    expect(
        all(chunk.policy_version == new for chunk in fresh),
        "a request sent after an update must carry the new version alone",
    )


async def _check_failed_apply(
    backend: InferenceBackend, case: InferenceCase, make_update: Callable[[PolicyVersion], WeightUpdate]
) -> None:
    served = (await backend.state()).policy_version
    new = PolicyVersion(served.incarnation, served.version + 1)
    good = make_update(new)
    far = PolicyVersion(served.incarnation, served.version + 41)
    delta = msgspec.structs.replace(good.manifest, kind=UpdateKind.DELTA, base=far)
    bad = {
        "a delta against another base": msgspec.structs.replace(good, manifest=delta),
        "an update whose payload is missing": msgspec.structs.replace(good, local_path=good.local_path + ".missing"),
    }
    for name, update in bad.items():
        try:
            ack = await within(backend.apply(update), case.timeout_s, f"apply() of {name} must return")
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"apply() of {name} must not raise; {type(error).__name__} was raised") from error
        expect(ack.status is not AckStatus.SERVING, f"{name} must not be acknowledged as SERVING")
        expect(ack.version == served, f"the ack of {name} must name the version that is still served")
        expect((await backend.state()).policy_version == served, f"after {name} the old version must be served")
        chunks = await _read(backend.generate(case.request(f"after {name}", 4)), case, f"a sample after {name}")
        expect(
            all(chunk.policy_version == served for chunk in chunks),
            f"a sample after {name} must carry the old version",
        )
