"""The reward role over real gRPC: our client against our servicer, and against servers that misbehave."""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from headrace.engine.errors import ConfigError, RewardError, UsageError
from headrace.engine.interfaces import Reward
from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.reward import SERVICE_NAME, GrpcReward, RewardServicer, sample_to_proto
from headrace.engine.transport.server import Service, serving
from headrace.engine.types import FinishReason, RewardOutcome, RewardSample, RewardStatus
from headrace.v1 import reward_pb2 as pb
from headrace.v1 import reward_pb2_grpc

OK, TIMEOUT, ERROR, ABSTAIN = RewardStatus.OK, RewardStatus.TIMEOUT, RewardStatus.ERROR, RewardStatus.ABSTAIN


class LengthReward:
    """Scores the length of the response; "stop" waits until released, "skip" abstains."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.seen: list[RewardSample] = []
        self.release = asyncio.Event()
        self.waiting = asyncio.Event()

    async def score(self, batch: Sequence[RewardSample]) -> list[RewardOutcome]:
        return [outcome async for _, outcome in self.outcomes(batch)]

    async def outcomes(self, batch: Sequence[RewardSample]) -> AsyncGenerator[tuple[int, RewardOutcome], None]:
        self.calls.append([sample.sample_id for sample in batch])
        self.seen.extend(batch)
        for index, sample in sorted(enumerate(batch), key=lambda pair: pair[1].response_text == "stop"):
            if sample.response_text == "stop":
                self.waiting.set()
                await self.release.wait()
            status = ABSTAIN if sample.response_text == "skip" else OK
            value = float(len(sample.response_text)) if status is OK else 0.0
            yield index, RewardOutcome(sample_id=sample.sample_id, status=status, value=value, metrics={"n": 1.0})

    async def close(self) -> None:
        self.release.set()


class ScriptedService(reward_pb2_grpc.RewardServiceServicer):
    """Answers as a test says; implements Score alone."""

    def __init__(self, answer: Callable[[pb.ScoreRequest], pb.ScoreResponse | grpc.StatusCode]) -> None:
        self.answer = answer
        self.requests: list[pb.ScoreRequest] = []
        self.running = self.most_running = 0

    def service(self) -> Service:
        return Service(
            name=SERVICE_NAME, add=lambda server: reward_pb2_grpc.add_RewardServiceServicer_to_server(self, server)
        )

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        answer = self.answer(request)
        if isinstance(answer, grpc.StatusCode):
            await context.abort(answer, "as scripted")
        assert isinstance(answer, pb.ScoreResponse)
        return answer

    async def ScoreStream(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.ScoreStreamResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no")
        yield pb.ScoreStreamResponse()

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no")
        raise AssertionError


def good(request: pb.ScoreRequest) -> pb.ScoreResponse:
    return pb.ScoreResponse(
        outcomes=[pb.RewardOutcome(sample_id=s.sample_id, outcome=pb.OUTCOME_OK, value=1.0) for s in request.samples]
    )


def samples(*responses: str) -> list[RewardSample]:
    return [RewardSample(sample_id=f"s{i}", response_text=text) for i, text in enumerate(responses)]


@asynccontextmanager
async def client(service: Service, **options: Any) -> AsyncIterator[GrpcReward]:
    async with serving([service], "127.0.0.1:0") as server:
        reward = GrpcReward(server.address, **{"backoff_s": 0.001, "rng": random.Random(1), **options})
        try:
            yield reward
        finally:
            await reward.close()
            await reward.close()


async def test_samples_and_outcomes_survive_the_wire_in_order() -> None:
    scorer = LengthReward()
    sample = RewardSample(
        sample_id="g/0/0",
        group_id="g",
        prompt_text="你好 🙂",
        response_text="",
        prompt_token_ids=(1, 2),
        response_token_ids=(3,),
        finish_reason=FinishReason.LENGTH,
        data={"answer": 4, "nested": {"list": [1, None, "x"]}},
    )
    async with client(RewardServicer(scorer, name="length").service(), batch_size=3) as reward:
        assert isinstance(reward, Reward)
        outcomes = await reward.score([sample, *samples("a", "bb", "skip", "dddd")])
        assert await reward.score([]) == []
    # The two batches go at the same time, so the server may see either first.
    assert [seen for seen in scorer.seen if seen.sample_id == sample.sample_id] == [sample]
    assert [(o.sample_id, o.status, o.value) for o in outcomes] == [
        ("g/0/0", OK, 0.0),
        ("s0", OK, 1.0),
        ("s1", OK, 2.0),
        ("s2", ABSTAIN, 0.0),
        ("s3", OK, 4.0),
    ]
    assert outcomes[0].metrics == {"n": 1.0}
    assert sorted(len(call) for call in scorer.calls) == [2, 3]


async def test_a_half_character_of_a_detokenizer_does_not_break_the_call() -> None:
    async with client(RewardServicer(LengthReward(), name="length").service()) as reward:
        assert (await reward.score(samples("ab\ud83d")))[0].status is OK


async def test_what_is_unfinished_at_the_deadline_is_a_timeout_and_the_rest_arrives() -> None:
    scorer = LengthReward()
    async with client(RewardServicer(scorer, name="length").service(), timeout_s=2.0) as reward:
        outcomes = await reward.score(samples("a", "stop", "ccc"))
    assert [outcome.status for outcome in outcomes] == [OK, TIMEOUT, OK]
    assert "'s1'" in outcomes[1].message and len(scorer.calls) == 1


async def test_a_retry_with_the_same_key_is_not_scored_twice() -> None:
    scorer = LengthReward()
    service = RewardServicer(scorer, name="length").service()
    async with serving([service], "127.0.0.1:0") as server, open_channel(server.address) as channel:
        stub: reward_pb2_grpc.RewardServiceAsyncStub = reward_pb2_grpc.RewardServiceStub(channel)
        request = pb.ScoreRequest(samples=[sample_to_proto(s) for s in samples("stop")], idempotency_key="k")
        first = stub.Score(request, timeout=60)
        await scorer.waiting.wait()
        first.cancel()  # the connection of the first try is lost
        second = asyncio.create_task(_answer(stub, request))
        await asyncio.sleep(0)
        scorer.release.set()
        third = await _answer(stub, request)
        assert await second == third and third.outcomes[0].value == 4.0
        assert len(scorer.calls) == 1
        request.samples[0].sample_id = "other"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Score(request, timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def _answer(stub: "reward_pb2_grpc.RewardServiceAsyncStub", request: pb.ScoreRequest) -> pb.ScoreResponse:
    return await stub.Score(request, timeout=60)


async def test_a_stream_answers_samples_as_they_are_ready_and_a_bad_one_alone() -> None:
    scorer = LengthReward()
    service = RewardServicer(scorer, name="length").service()
    async with serving([service], "127.0.0.1:0") as server, open_channel(server.address) as channel:
        stub: reward_pb2_grpc.RewardServiceAsyncStub = reward_pb2_grpc.RewardServiceStub(channel)
        call = stub.ScoreStream(timeout=60)
        messages = [sample_to_proto(sample) for sample in samples("stop", "bb", "ccc")]
        messages[2].data_json = "[1, 2]"
        for message in messages:
            await call.write(pb.ScoreStreamRequest(sample=message))
        await call.done_writing()
        early = [await _read(call), await _read(call)]
        assert sorted(answer.outcome.sample_id for answer in early) == ["s1", "s2"]
        bad = next(answer.outcome for answer in early if answer.outcome.sample_id == "s2")
        assert bad.outcome == pb.OUTCOME_ERROR and "not a JSON object" in bad.message
        scorer.release.set()
        assert (await _read(call)).outcome.value == 4.0
        assert await call.read() is grpc.aio.EOF


async def _read(call: "grpc.aio.StreamStreamCall[pb.ScoreStreamRequest, pb.ScoreStreamResponse]") -> Any:
    return await call.read()


async def test_what_describe_says_limits_the_client() -> None:
    scorer = LengthReward()
    servicer = RewardServicer(scorer, name="length", version="1", max_batch=2)
    async with client(servicer.service(), batch_size=64) as reward:
        assert len(await reward.score(samples(*"abcde"))) == 5
    assert max(len(call) for call in scorer.calls) == 2


async def test_a_batch_above_the_described_limit_is_refused() -> None:
    servicer = RewardServicer(LengthReward(), name="length", max_batch=1)
    async with serving([servicer.service()], "127.0.0.1:0") as server, open_channel(server.address) as channel:
        stub: reward_pb2_grpc.RewardServiceAsyncStub = reward_pb2_grpc.RewardServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="at most 1"):
            await stub.Score(pb.ScoreRequest(samples=[sample_to_proto(s) for s in samples("a", "b")]), timeout=60)


async def test_reward_server_5xx_one_bad_sample_is_retried_and_then_fails_alone() -> None:
    def answer(request: pb.ScoreRequest) -> pb.ScoreResponse | grpc.StatusCode:
        return grpc.StatusCode.INTERNAL if "s7" in [s.sample_id for s in request.samples] else good(request)

    service = ScriptedService(answer)
    async with client(service.service(), batch_size=16, max_concurrency=3, retries=2) as reward:
        outcomes = await reward.score(samples(*["x"] * 64))
    assert [index for index, outcome in enumerate(outcomes) if outcome.status is not OK] == [7]
    assert outcomes[7].status is ERROR and "failed 3 times, last with INTERNAL: as scripted" in outcomes[7].message
    alone = [request for request in service.requests if [s.sample_id for s in request.samples] == ["s7"]]
    assert len(alone) == 3 and len({request.idempotency_key for request in alone}) == 1
    assert len(service.requests) == 4 + 16 + 2 and service.most_running <= 3


async def test_reward_server_5xx_an_outage_is_waited_for_and_nothing_is_scored_zero() -> None:
    service = ScriptedService(good)
    async with client(service.service(), backoff_s=0.01, outage_s=30.0) as reward:
        await reward.start()
        refusals = iter(range(5))
        service.answer = lambda request: (
            grpc.StatusCode.UNAVAILABLE if next(refusals, None) is not None else good(request)
        )
        outcomes = await reward.score(samples("a", "b"))
    assert [(outcome.status, outcome.value) for outcome in outcomes] == [(OK, 1.0)] * 2
    assert len(service.requests) == 6


async def test_reward_server_5xx_an_outage_past_its_limit_is_an_error_that_names_the_server() -> None:
    service = ScriptedService(lambda request: grpc.StatusCode.UNAVAILABLE)
    async with client(service.service(), outage_s=0.05) as reward:
        outcomes = await reward.score(samples("a"))
    assert outcomes[0].status is ERROR
    assert "reward server grpc://127.0.0.1:" in outcomes[0].message and "was away for 0.05 s" in outcomes[0].message


async def test_reward_server_5xx_a_server_that_comes_back_on_its_address_is_used_again() -> None:
    scorer = LengthReward()
    async with serving([RewardServicer(scorer, name="length").service()], "127.0.0.1:0") as server:
        address = server.address
        reward = GrpcReward(address, backoff_s=0.02)
        assert (await reward.score(samples("a")))[0].value == 1.0
    call = asyncio.create_task(reward.score(samples("bb")))
    async with serving([RewardServicer(scorer, name="length").service()], address):
        assert (await call)[0].value == 2.0
    await reward.close()


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "UNIMPLEMENTED", "FAILED_PRECONDITION"])
async def test_reward_server_5xx_a_refusal_is_not_retried(code: str) -> None:
    service = ScriptedService(lambda request: grpc.StatusCode[code])
    async with client(service.service()) as reward:
        outcomes = await reward.score(samples("a", "b"))
    assert [outcome.status for outcome in outcomes] == [ERROR, ERROR] and len(service.requests) == 1
    assert code in outcomes[0].message


async def test_a_batch_past_its_deadline_is_asked_again_sample_by_sample() -> None:
    class Slow(ScriptedService):
        async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
            if "s1" in [sample.sample_id for sample in request.samples]:
                await asyncio.Event().wait()
            return await super().Score(request, context)

    async with client(Slow(good).service(), timeout_s=1.0) as reward:
        outcomes = await reward.score(samples("a", "b", "c"))
    assert [outcome.status for outcome in outcomes] == [OK, TIMEOUT, OK]


def _broken(request: pb.ScoreRequest, kind: str) -> pb.ScoreResponse:
    reply = good(request)
    match kind:
        case "short":
            del reply.outcomes[-1]
        case "nan":
            reply.outcomes[1].value = math.nan
        case "id":
            reply.outcomes[1].sample_id = "s0"
        case "no id":
            reply.outcomes[1].sample_id = ""
        case "status":
            reply.outcomes[1].outcome = pb.OUTCOME_UNSPECIFIED
    return reply


@pytest.mark.parametrize(
    ("kind", "says", "bad"),
    [
        ("short", "answered 2 outcomes for 3 samples", [0, 1, 2]),
        ("nan", "the value nan", [1]),
        ("id", "sample_id 's0' where 's1' was asked", [1]),
        ("no id", "no sample_id where 's1' was asked", [1]),
        ("status", "outcome 0", [1]),
    ],
)
async def test_a_reply_that_breaks_the_contract_is_an_error_for_its_samples(
    kind: str, says: str, bad: list[int]
) -> None:
    service = ScriptedService(lambda request: _broken(request, kind))
    async with client(service.service()) as reward:
        outcomes = await reward.score(samples("a", "b", "c"))
    assert [index for index, outcome in enumerate(outcomes) if outcome.status is ERROR] == bad
    assert says in outcomes[bad[0]].message and "reward server grpc://127.0.0.1" in outcomes[bad[0]].message
    assert len(service.requests) == 1


async def test_calls_stay_below_the_message_limit_of_other_servers() -> None:
    service = ScriptedService(good)
    async with client(service.service()) as reward:
        outcomes = await reward.score(samples(*["x" * 1_000_000] * 7))
    assert {outcome.status for outcome in outcomes} == {OK}
    assert max(request.ByteSize() for request in service.requests) < 4 << 20 and len(service.requests) == 3


async def test_closing_the_client_ends_running_calls_as_errors() -> None:
    scorer = LengthReward()
    async with client(RewardServicer(scorer, name="length").service()) as reward:
        call = asyncio.create_task(reward.score(samples("stop")))
        await scorer.waiting.wait()
        await reward.close()
        (outcome,) = await call
    assert outcome.status is ERROR and "the client was closed" in outcome.message


async def test_cancelling_a_call_withdraws_it_and_leaves_the_client_usable() -> None:
    scorer = LengthReward()
    async with client(RewardServicer(scorer, name="length").service()) as reward:
        call = asyncio.create_task(reward.score(samples("stop")))
        await scorer.waiting.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await reward.score(samples("aa")))[0].value == 2.0


async def test_no_server_at_start_is_one_sentence_that_names_the_setting() -> None:
    reward = GrpcReward("127.0.0.1:1", connect_timeout_s=0.2)
    with pytest.raises(RewardError, match=r"reward\.address '127\.0\.0\.1:1' within 0\.2 s.*correct the address"):
        await reward.score(samples("a"))
    await reward.close()
    with pytest.raises(UsageError, match="closed"):
        await reward.start()


def test_a_malformed_address_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"reward\.address"):
        GrpcReward("http://example.org/score")


async def test_proxy_env_a_server_on_this_host_is_reached_past_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    async with client(RewardServicer(LengthReward(), name="length").service(), connect_timeout_s=5.0) as reward:
        assert (await reward.score(samples("a")))[0].value == 1.0
    away = GrpcReward("reward.invalid:50051", connect_timeout_s=0.2)
    with pytest.raises(RewardError, match="through the proxy of the environment variable http_proxy"):
        await away.start()
