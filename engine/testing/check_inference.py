"""Conformance of an `InferenceBackend`."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from headrace.engine.errors import UsageError, WeightUpdateError
from headrace.engine.interfaces import InferenceBackend
from headrace.engine.testing.check_updates import check_updates
from headrace.engine.testing.expect import expect, until, within
from headrace.engine.testing.inference_streams import InferenceCase, count_tokens, first_chunk, read_stream
from headrace.engine.types import FinishReason, GenerateRequest, PauseMode, PolicyVersion

__all__ = ["InferenceCase", "check_inference_backend"]


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
            await check_updates(backend, case, case.make_update)
    finally:
        await within(backend.close(), case.timeout_s, "close() must return")
    await within(backend.close(), case.timeout_s, "a second close() must return")


async def _check_stream(backend: InferenceBackend, case: InferenceCase) -> None:
    version = (await backend.state()).policy_version
    chunks = await read_stream(backend.generate(case.request("stream", 4)), case, "a short sample")
    expect(1 <= count_tokens(chunks) <= 4, "a sample must have at least one token and at most max_tokens")
    if count_tokens(chunks) == 4:
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
    await first_chunk(chunks, case, "a sample")
    await within(chunks.aclose(), case.timeout_s, "closing a generator must return")
    reading = asyncio.ensure_future(read_stream(backend.generate(case.request("cancelled")), case, "a sample"))
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
    first = await first_chunk(chunks, case, "a sample")
    await within(backend.pause(PauseMode.KEEP), case.timeout_s, "pause(KEEP) must return")
    reading = asyncio.ensure_future(read_stream(chunks, case, "a kept sample"))
    await asyncio.wait({reading}, timeout=case.quiet_s)
    expect(not reading.done(), "no request may go on between pause and resume; raise long_tokens if it was done before")
    before = (await backend.state()).num_tokens
    await asyncio.wait({reading}, timeout=case.quiet_s)
    expect((await backend.state()).num_tokens == before, "no token may be produced between pause and resume")
    await within(backend.resume(), case.timeout_s, "resume() must return")
    await within(backend.resume(), case.timeout_s, "resume() must be harmless when not paused")
    rest = await reading
    expect(rest[-1].finish_reason is not FinishReason.ABORTED, "a request must go on after pause(KEEP) and resume()")
    total = count_tokens([first, *rest])
    expect(total <= case.long_tokens, "a kept request must not get more than max_tokens in all")


async def _check_abort_returns_all(backend: InferenceBackend, case: InferenceCase) -> None:
    """Abort and pause answer every waiting caller; new requests are held until resume."""
    streams = [backend.generate(case.request(f"aborted-{index}")) for index in range(case.num_requests)]
    readings = [asyncio.ensure_future(read_stream(stream, case, "an aborted sample")) for stream in streams]
    await until(_all_inside(backend, case.num_requests), case.timeout_s, "requests that are read must show in state()")
    await within(backend.pause(PauseMode.ABORT), case.timeout_s, "pause(ABORT) must return")
    done, waiting = await asyncio.wait(readings, timeout=0.8 * case.timeout_s)  # before their own limit
    for reading in waiting:
        reading.cancel()
    expect(not waiting, f"pause(ABORT) must answer every caller; {len(waiting)} of {len(readings)} got no answer")
    ends = [(await reading)[-1].finish_reason for reading in done]
    expect(FinishReason.ABORTED in ends, "a request that pause(ABORT) ended must have the finish reason ABORTED")
    held = asyncio.ensure_future(
        read_stream(backend.generate(case.request("held", 4)), case, "a sample sent while paused")
    )
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
