"""What `headrace reward check` asks a server, and what it says about the answers."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
import msgspec
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.engine.errors import RewardError
from headrace.engine.transport.channel import open_channel, proxy_hint, target_of
from headrace.engine.transport.reward import SERVICE_NAME, outcomes_from_reply, sample_to_proto
from headrace.engine.transport.reward_client import is_local
from headrace.engine.types import RewardOutcome, RewardSample, RewardStatus
from headrace.v1 import reward_pb2 as pb
from headrace.v1 import reward_pb2_grpc

if TYPE_CHECKING:
    from headrace.v1.reward_pb2_grpc import RewardServiceAsyncStub

_CONNECT_TIMEOUT_S = 10.0
_NO_TIME_S = 0.001
# What gRPC reports in place of the server's status where that arrives while a message is being written.
_LOST_STATUS = "Internal error from Core"


class CheckOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the samples look like and how hard the server is driven.

    Attributes:
        prompt, response, data: Of a sample that the scorer can judge.
        num_calls: Calls of the load test, one sample each.
        concurrency: How many of them at the same time.
        timeout_s: Deadline of each call.
    """

    prompt: str = "What is 2 + 2?"
    response: str = "4"
    data: dict[str, Any] = {}
    num_calls: int = 200
    concurrency: int = 8
    timeout_s: float = 30.0


class CheckReport(msgspec.Struct, kw_only=True):
    """The verdict.

    Attributes:
        faults: What breaks the contract, a sentence each; any of them fails the check.
        advice: What works but could be better.
        passed: Names of the checks that found nothing.
        p50_s, p99_s: Latency of one call under load; NaN where no call succeeded.
    """

    faults: list[str] = []
    advice: list[str] = []
    passed: list[str] = []
    p50_s: float = math.nan
    p99_s: float = math.nan

    def text(self) -> str:
        """The report for a person."""
        lines = [f"ok      {name}" for name in self.passed]
        lines += [f"advice  {sentence}" for sentence in self.advice]
        lines += [f"FAULT   {sentence}" for sentence in self.faults]
        if not math.isnan(self.p50_s):
            lines.append(f"latency p50 {self.p50_s * 1000:.1f} ms, p99 {self.p99_s * 1000:.1f} ms")
        lines.append("the server keeps the contract" if not self.faults else f"{len(self.faults)} faults")
        return "\n".join(lines)


async def check_server(address: str, options: CheckOptions) -> CheckReport:
    """Ask a running server everything that a run would; takes seconds, or the deadline of each call that hangs.

    Raises:
        RewardError: No server answered within 10 s.
        ConfigError: The address is malformed.
    """
    async with open_channel(address, internal=is_local(target_of(address))) as channel:
        await _reach(channel, address)
        check = _Check(channel, f"the server at {address}", options)
        steps: list[tuple[str, Callable[[], Awaitable[object]]]] = [
            ("health checking and reflection", check.health_and_reflection),
            ("Describe", check.describe),
            ("an empty batch", lambda: check.batch("an empty batch", [])),
            ("order and ids of a batch", check.order_and_ids),
            ("an empty response", lambda: check.variant("an empty response", response="")),
            ("unicode", lambda: check.variant("unicode", response="\u2248 4 \U0001f642 \u202e\x00 e\u0301")),
            ("a response of 1 MiB", lambda: check.variant("a response of 1 MiB", response="x" * (1 << 20))),
            ("a sample without data", lambda: check.variant("a sample without data", data={})),
            ("the same sample twice", check.duplicates),
            ("a retry with the same key", check.retry),
            ("ScoreStream", check.stream),
            ("a call that is given up", check.given_up),
            (f"{options.num_calls} calls, {options.concurrency} at a time", check.load),
        ]
        for name, step in steps:
            before = len(check.report.faults) + len(check.report.advice)
            await step()
            if len(check.report.faults) + len(check.report.advice) == before:
                check.report.passed.append(name)
        check.judge_outcomes()
    return check.report


async def _reach(channel: grpc.aio.Channel, address: str) -> None:
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await channel.channel_ready()
    except TimeoutError as error:
        hint = "" if is_local(target_of(address)) else proxy_hint()
        raise RewardError(
            f"no server answered at {address} within {_CONNECT_TIMEOUT_S:g} s{hint}; start it or correct the address"
        ) from error


class _Check:
    """One connection, the report that grows, and a method for each check."""

    def __init__(self, channel: grpc.aio.Channel, server: str, options: CheckOptions) -> None:
        self.report = CheckReport()
        self._channel = channel
        self._stub: RewardServiceAsyncStub = reward_pb2_grpc.RewardServiceStub(channel)
        self._server = server
        self._options = options
        self._seen: list[RewardOutcome] = []

    def _sample(self, sample_id: str, response: str | None = None, data: dict[str, Any] | None = None) -> RewardSample:
        return RewardSample(
            sample_id=sample_id,
            group_id="check",
            prompt_text=self._options.prompt,
            response_text=self._options.response if response is None else response,
            data=self._options.data if data is None else data,
        )

    async def batch(self, what: str, samples: Sequence[RewardSample], key: str = "") -> list[RewardOutcome]:
        """Score; what breaks the contract becomes a fault. Empty where the call failed."""
        request = pb.ScoreRequest(samples=[sample_to_proto(sample) for sample in samples], idempotency_key=key)
        try:
            reply = await self._stub.Score(request, timeout=self._options.timeout_s)
        except grpc.aio.AioRpcError as error:
            self.report.faults.append(f"{what}: Score failed with {error.code().name}: {error.details()}")
            return []
        outcomes = outcomes_from_reply(samples, reply, self._server)
        if len(reply.outcomes) != len(samples):
            numbers = f"{len(reply.outcomes)} outcomes for {len(samples)} samples"
            self.report.faults.append(f"{what}: {self._server} answered {numbers}; give one a sample, in order")
            return []
        for outcome, message in zip(outcomes, reply.outcomes, strict=True):
            if outcome.status is RewardStatus.ERROR and message.outcome != pb.OUTCOME_ERROR:
                self.report.faults.append(f"{what}: {outcome.message}")  # our own verdict, not the server's
                return []
            if outcome.status is not RewardStatus.OK and not outcome.message:
                self._advise(f"give a message with {outcome.status.name}, so that people learn why")
        self._seen += outcomes
        return outcomes

    async def variant(self, what: str, response: str | None = None, data: dict[str, Any] | None = None) -> None:
        await self.batch(what, [self._sample("variant", response, data)])

    async def health_and_reflection(self) -> None:
        try:
            health: Any = health_pb2_grpc.HealthStub(self._channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=self._options.timeout_s)
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                self.report.faults.append("health checking says that it is not serving")
        except grpc.aio.AioRpcError as error:
            self._advise(f"serve grpc.health.v1.Health, so that an orchestrator sees its state ({error.code().name})")
        try:
            reflection = cast(Any, reflection_pb2_grpc.ServerReflectionStub)(self._channel)
            requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            names: list[str] = []
            async for answer in reflection.ServerReflectionInfo(requests, timeout=self._options.timeout_s):
                names += [service.name for service in answer.list_services_response.service]
            if SERVICE_NAME not in names:
                self._advise(f"add {SERVICE_NAME} to reflection")
        except grpc.aio.AioRpcError as error:
            self._advise(f"serve reflection, so that grpcurl works without the proto files ({error.code().name})")

    async def describe(self) -> None:
        try:
            answer = await self._stub.Describe(pb.DescribeRequest(), timeout=self._options.timeout_s)
            if not answer.name:
                self._advise("say a name in Describe: it appears in messages and metrics")
        except grpc.aio.AioRpcError as error:
            self._advise(f"implement Describe ({error.code().name}); without it no limit on batches is known")

    async def order_and_ids(self) -> None:
        await self.batch("order and ids of a batch", [self._sample(f"order-{i}", str(i)) for i in (3, 1, 2, 5, 4)])

    async def duplicates(self) -> None:
        outcomes = await self.batch("the same sample twice", [self._sample("twice"), self._sample("twice")])
        outcomes += await self.batch("the same sample once more", [self._sample("twice")])
        if len({(outcome.status, outcome.value) for outcome in outcomes}) > 1:
            values = ", ".join(f"{outcome.status.name} {outcome.value:g}" for outcome in outcomes)
            self.report.faults.append(f"the same sample got different outcomes: {values}; scoring must be repeatable")

    async def retry(self) -> None:
        samples = [self._sample("retry-0"), self._sample("retry-1")]
        key = f"check-{time.time_ns()}"
        first, second = [await self.batch("a retry with the same key", samples, key) for _ in range(2)]
        if first != second:
            self.report.faults.append("a retry with the same idempotency_key got other outcomes than the first call")

    async def stream(self, tries: int = 10) -> None:
        asked = [f"stream-{i}" for i in range(5)]
        requests = [pb.ScoreStreamRequest(sample=sample_to_proto(self._sample(name))) for name in asked]
        try:
            call = self._stub.ScoreStream(iter(requests), timeout=self._options.timeout_s)
            answered = [answer.outcome.sample_id async for answer in call]
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._advise("ScoreStream is not implemented; runs use Score alone, so this is no fault")
            elif error.details() == _LOST_STATUS and tries > 1:
                await self.stream(tries - 1)
            else:
                self.report.faults.append(f"ScoreStream failed with {error.code().name}: {error.details()}")
            return
        if sorted(answered) != asked:
            self.report.faults.append(f"ScoreStream was asked for {', '.join(asked)} and answered {answered}")

    async def given_up(self) -> None:
        """A call whose deadline passes at once must neither block nor break the server."""
        request = pb.ScoreRequest(samples=[sample_to_proto(self._sample(f"late-{i}")) for i in range(64)])
        try:
            await self._stub.Score(request, timeout=_NO_TIME_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                self.report.faults.append(f"a call past its deadline ended with {error.code().name}")
        await self.batch("a call after one past its deadline", [self._sample("after")])

    async def load(self) -> None:
        places = asyncio.Semaphore(self._options.concurrency)
        seconds: list[float] = []

        async def one(index: int) -> None:
            async with places:
                begin = time.perf_counter()
                if await self.batch("under load", [self._sample(f"load-{index}")]):
                    seconds.append(time.perf_counter() - begin)

        before = len(self.report.faults)
        await asyncio.gather(*(one(index) for index in range(self._options.num_calls)))
        if len(self.report.faults) > before + 1:
            num_failed = len(self.report.faults) - before
            self.report.faults[before:] = [f"{self.report.faults[before]} ({num_failed} calls failed under load)"]
        if seconds:
            self.report.p50_s, self.report.p99_s = (float(np.quantile(seconds, q)) for q in (0.5, 0.99))

    def judge_outcomes(self) -> None:
        """A server may refuse every sample of ours and keep the contract; the person should know."""
        if self._seen and all(outcome.status is RewardStatus.ERROR for outcome in self._seen):
            self._advise(
                f"every sample ended as ERROR (the first: {self._seen[0].message!r}); "
                "give --prompt, --response and --data that the scorer knows"
            )

    def _advise(self, sentence: str) -> None:
        if sentence not in self.report.advice:
            self.report.advice.append(sentence)
