"""A sample on its way from vLLM's collector to the caller; vLLM itself is not needed for it."""

import asyncio
from dataclasses import dataclass, field

import pytest

from headrace.actors.rollout.vllm_stream import VllmStream
from headrace.engine.errors import ActorLostError, RunError
from headrace.engine.types import FinishReason, GenerateRequest, PolicyVersion, SamplingParams, TokenChunk


@dataclass
class Logprob:
    logprob: float


@dataclass
class Completion:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str | None


@dataclass
class Output:
    outputs: list[Completion]
    request_id: str = "e"


@dataclass
class Collector:
    """Keeps one output until it is fetched, as vLLM's does."""

    output: Output | Exception | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, output: Output | Exception) -> None:
        self.output = output
        self.ready.set()

    def get_nowait(self) -> Output | None:
        output, self.output = self.output, None
        if output is not None:
            self.ready.clear()
        if isinstance(output, Exception):
            raise output
        return output

    async def get(self) -> Output:
        while (output := self.get_nowait()) is None:
            await self.ready.wait()
        return output

    def close(self) -> None:
        self.ready.clear()


class Versions:
    """What a backend serves, and how many tokens it has counted."""

    def __init__(self) -> None:
        self.version = PolicyVersion(0, 3)
        self.num_tokens = 0

    def stamp(self, num_tokens: int) -> PolicyVersion:
        self.num_tokens += num_tokens
        return self.version


def output(*tokens: int, reason: str | None = None) -> Output:
    return Output([Completion(list(tokens), [{token: Logprob(-token / 10)} for token in tokens], reason)])


def stream_of(versions: Versions) -> VllmStream:
    request = GenerateRequest(request_id="r", token_ids=(1,), sampling=SamplingParams())
    return VllmStream(request, versions.stamp)


async def test_version_stamp_what_lies_in_the_collector_at_the_fence_gets_the_old_version() -> None:
    versions, collector = Versions(), Collector()
    stream = stream_of(versions)
    stream.attach("e", collector)
    collector.put(output(1, 2))
    stream.drain()
    versions.version = PolicyVersion(0, 4)
    collector.put(output(3, reason="length"))
    old, new = await stream.next(), await stream.next()
    assert old == TokenChunk(token_ids=(1, 2), logprobs=(-0.1, -0.2), policy_version=PolicyVersion(0, 3))
    assert (new.token_ids, new.policy_version.version, new.finish_reason) == ((3,), 4, FinishReason.LENGTH)
    assert (stream.num_tokens, versions.num_tokens, stream.ended) == (3, 3, True)


async def test_abort_answers_once_and_later_tokens_do_not_count() -> None:
    versions, collector = Versions(), Collector()
    stream = stream_of(versions)
    stream.attach("e", collector)
    stream.abort()
    stream.abort()
    collector.put(output(1, reason="abort"))
    stream.drain()
    assert (await stream.next()).finish_reason is FinishReason.ABORTED
    await asyncio.sleep(0)
    assert stream.num_tokens == versions.num_tokens == 0
    stream.detach()


async def test_a_new_submission_takes_the_place_of_the_old_one() -> None:
    versions, old, new = Versions(), Collector(), Collector()
    stream = stream_of(versions)
    stream.attach("old", old)
    stream.attach("new", new)
    old.put(output(1, reason="abort"))
    new.put(output(2, reason="stop"))
    assert (await stream.next()).token_ids == (2,)
    assert stream.engine_id == "new"
    stream.detach()


@pytest.mark.parametrize(("error", "kind"), [(ValueError("dead"), ActorLostError), (RunError("bad"), RunError)])
async def test_an_error_of_the_engine_reaches_the_caller(error: Exception, kind: type[Exception]) -> None:
    collector = Collector()
    stream = stream_of(Versions())
    stream.attach("e", collector)
    collector.put(error)
    with pytest.raises(kind, match=r"dead|bad"):
        await stream.next()
    assert stream.ended


async def test_an_end_that_is_not_known_is_an_error() -> None:
    collector = Collector()
    stream = stream_of(Versions())
    stream.attach("e", collector)
    collector.put(output(1, reason="error"))
    with pytest.raises(RunError, match="'error'"):
        await stream.next()
