"""What the conformance checks of an `InferenceBackend` ask for, and the rules that hold for each of its streams."""

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from headrace.engine.testing.expect import expect, within
from headrace.engine.types import (
    FinishReason,
    GenerateRequest,
    PolicyVersion,
    SamplingParams,
    TokenChunk,
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
        deltas: The backend takes change files, on top of what `make_update` gives.
        num_requests: At once; give the backend fewer slots than that, so that some wait.
        timeout_s: For each single wait.
        quiet_s: How long the check listens to be sure that nothing comes.
    """

    prompt: tuple[int, ...] = (1, 2, 3)
    long_tokens: int = 64
    make_update: Callable[[PolicyVersion], WeightUpdate] | None = None
    deltas: bool = False
    num_requests: int = 5
    timeout_s: float = 60.0
    quiet_s: float = 0.05

    def request(self, name: str, max_tokens: int | None = None, **changes: PolicyVersion) -> GenerateRequest:
        """A request of `long_tokens` unless told otherwise."""
        sampling = SamplingParams(max_tokens=max_tokens or self.long_tokens, seed=7)
        return GenerateRequest(request_id=name, token_ids=self.prompt, sampling=sampling, **changes)


async def read_stream(chunks: AsyncGenerator[TokenChunk, None], case: InferenceCase, what: str) -> list[TokenChunk]:
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


async def first_chunk(chunks: AsyncGenerator[TokenChunk, None], case: InferenceCase, what: str) -> TokenChunk:
    """The first chunk, which must not be the last."""
    chunk = await within(anext(chunks), case.timeout_s, f"{what} must begin")
    expect(chunk.finish_reason is FinishReason.NONE, f"{what} must not end with its first chunk; raise long_tokens")
    return chunk


def count_tokens(chunks: Sequence[TokenChunk]) -> int:
    """Of all chunks."""
    return sum(len(chunk.token_ids) for chunk in chunks)
