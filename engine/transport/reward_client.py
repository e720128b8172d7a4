"""Scores with a RewardService somewhere else.

What each failure of a call becomes:

| status                                  | of a batch              | of a single sample                |
|-----------------------------------------|-------------------------|-----------------------------------|
| UNAVAILABLE: an outage                  | like one sample         | back-off for `outage_s`, ERROR    |
| DEADLINE_EXCEEDED                       | again sample by sample  | TIMEOUT                           |
| INVALID_ARGUMENT, UNIMPLEMENTED, ...    | ERROR                   | ERROR                             |
| INTERNAL, UNKNOWN, and all others       | again sample by sample  | `retries` times again, then ERROR |

So one bad sample is an ERROR alone, and nothing is ever scored 0 because of a failure. Waiting for a retry holds no
place among the `max_concurrency` calls.
"""

import asyncio
import ipaddress
import random
import uuid
from collections.abc import Sequence
from typing import cast

import grpc
import grpc.aio
import msgspec

from headrace.engine.clock import Clock, SystemClock
from headrace.engine.config.schema import RewardConfig
from headrace.engine.errors import ConfigError, RewardError, UsageError
from headrace.engine.scheduling.retry import Deadline, RetryPolicy
from headrace.engine.transport.channel import open_channel, proxy_hint, target_of
from headrace.engine.transport.reward_convert import failed, outcomes_from_reply, sample_to_proto, timed_out
from headrace.engine.transport.reward_metrics import MetricNames
from headrace.engine.types import RewardOutcome, RewardSample
from headrace.v1 import reward_pb2 as pb
from headrace.v1 import reward_pb2_grpc

_MAX_CALL_BYTES = 3 << 20  # below the 4 MiB that a server takes unless it was told otherwise
_ASSUMED_PARALLEL = 8
_OUTAGE_RETRIES = 1_000_000  # the deadline ends an outage, not the count
_FINAL_CODES = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)


class GrpcReward:
    """Client of a reward server (implements `Reward`). Not shared between event loops."""

    def __init__(
        self,
        address: str,
        *,
        batch_size: int = 64,
        max_concurrency: int = 4,
        timeout_s: float = 30.0,
        retries: int = 3,
        connect_timeout_s: float = 20.0,
        outage_s: float = 300.0,
        backoff_s: float = 0.2,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Prepare a client; nothing is sent yet.

        Args:
            address: `grpc://HOST:PORT`, `HOST:PORT` or `unix:/PATH`.
            batch_size: Most samples in one call; a server may ask for fewer.
            max_concurrency: Most calls in flight; a server may ask for fewer.
            timeout_s: Deadline of a call with one sample. A call with n samples gets `timeout_s * (1 + (n - 1) / 8)`.
            retries: How often a sample that failed is sent again.
            connect_timeout_s: How long `start` waits for the server.
            outage_s: How long a sample waits for a server that has gone away.
            backoff_s: First delay between retries; it doubles up to 50 times this, with full jitter.
            clock: For deadlines.
            rng: For the jitter.

        Raises:
            ConfigError: The address is malformed.
        """
        self._target = target_of(address, setting="reward.address")
        self._address = address
        self._server = f"reward server {address}"
        self._names = MetricNames(self._server)
        self._batch_size = batch_size
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._outage_s = outage_s
        self._retry = RetryPolicy(retries=retries, base_s=backoff_s, max_s=50 * backoff_s)
        self._outage = RetryPolicy(retries=_OUTAGE_RETRIES, base_s=backoff_s, max_s=50 * backoff_s)
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._max_concurrency = max_concurrency
        self._calls = asyncio.Semaphore(max_concurrency)
        self._starting = asyncio.Lock()
        self._channel: grpc.aio.Channel | None = None
        self._stub: reward_pb2_grpc.RewardServiceAsyncStub | None = None
        self._closed = False

    @classmethod
    def from_config(cls, config: RewardConfig) -> "GrpcReward":
        """The client of `[reward] address = ...`.

        Raises:
            ConfigError: `reward.address` is empty or malformed.
        """
        if not config.address:
            raise ConfigError("reward.address is empty; give grpc://HOST:PORT or unix:/PATH")
        return cls(
            config.address,
            batch_size=config.batch_size,
            max_concurrency=config.max_concurrency,
            timeout_s=config.timeout_s,
            retries=config.retries,
            connect_timeout_s=config.connect_timeout_s,
        )

    async def start(self) -> None:
        """Connect and ask what the server can take; waits up to `connect_timeout_s`. `score` calls it; may be repeated.

        Raises:
            RewardError: No server answered in time.
            UsageError: The client is closed.
        """
        async with self._starting:
            if self._closed:
                raise UsageError(f"the client of {self._server} is closed; make a new one")
            if self._stub is not None:
                return
            channel = open_channel(self._address, internal=is_local(self._target), setting="reward.address")
            try:
                stub: reward_pb2_grpc.RewardServiceAsyncStub = reward_pb2_grpc.RewardServiceStub(channel)
                description = await self._describe(stub)
            except BaseException:
                await channel.close()
                raise
            if description.max_batch:
                self._batch_size = min(self._batch_size, description.max_batch)
            if description.max_concurrency:
                self._calls = asyncio.Semaphore(min(self._max_concurrency, description.max_concurrency))
            self._channel, self._stub = channel, stub

    async def score(self, batch: Sequence[RewardSample]) -> list[RewardOutcome]:
        """One outcome a sample, in order. Waits for the server, and for its return after an outage, up to `outage_s`.

        Cancelling withdraws the calls; the server may finish what it has begun.

        Raises:
            RewardError: The server was never reached (see `start`).
        """
        await self.start()
        chunks = self._chunks([(sample, sample_to_proto(sample)) for sample in batch])
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._score_chunk(chunk)) for chunk in chunks]
        return [outcome for task in tasks for outcome in task.result()]

    async def close(self) -> None:
        """Close the connection; running calls end as errors. May be called twice."""
        self._closed = True
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _describe(self, stub: "reward_pb2_grpc.RewardServiceAsyncStub") -> pb.DescribeResponse:
        try:
            wait_s = self._connect_timeout_s
            reply = await stub.Describe(pb.DescribeRequest(), timeout=wait_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return pb.DescribeResponse()  # a minimal server: it is there, and says no limits
            reason = "" if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else f" ({_text(error)})"
            hint = "" if is_local(self._target) else proxy_hint()
            raise RewardError(
                f"no reward server answered at reward.address {self._address!r} within "
                f"{self._connect_timeout_s:g} s{hint}{reason}; start it or correct the address"
            ) from error
        if cast("pb.DescribeResponse | None", reply) is None:  # gRPC's word for bytes that cannot be read
            raise RewardError(f"what answers at reward.address {self._address!r} is no reward server")
        return reply

    def _chunks(
        self, pairs: Sequence[tuple[RewardSample, pb.RewardSample]]
    ) -> list[list[tuple[RewardSample, pb.RewardSample]]]:
        """Consecutive pairs, cut at `batch_size` samples and at 3 MiB; a larger sample goes alone."""
        chunks: list[list[tuple[RewardSample, pb.RewardSample]]] = []
        num_bytes = 0
        for pair in pairs:
            size = pair[1].ByteSize()
            if not chunks or len(chunks[-1]) == self._batch_size or num_bytes + size > _MAX_CALL_BYTES:
                chunks.append([])
                num_bytes = 0
            chunks[-1].append(pair)
            num_bytes += size
        return chunks

    async def _score_chunk(self, chunk: Sequence[tuple[RewardSample, pb.RewardSample]]) -> list[RewardOutcome]:
        samples = [sample for sample, _ in chunk]
        request = pb.ScoreRequest(samples=[message for _, message in chunk], idempotency_key=uuid.uuid4().hex)
        timeout_s = self._timeout_s * (1 + (len(chunk) - 1) / _ASSUMED_PARALLEL)
        failures = outages = 0
        outage_ends: Deadline | None = None
        while True:
            error = await self._call(request, samples, timeout_s)
            if isinstance(error, list):
                return error
            code, now = error.code(), self._clock.monotonic()
            if code in _FINAL_CODES:
                return self._failed(samples, f"refused it with {_text(error)}")
            if code is grpc.StatusCode.UNAVAILABLE:
                outage_ends = outage_ends or Deadline.after(now, self._outage_s)
                delay_s = self._outage.next_delay(outages, self._rng, now, outage_ends)
                outages += 1
                if delay_s is None:
                    return self._failed(samples, f"was away for {self._outage_s:g} s{proxy_hint()}: {_text(error)}")
            elif len(chunk) > 1:
                singles = await asyncio.gather(*(self._score_chunk([pair]) for pair in chunk))
                return [outcome for (outcome,) in singles]
            elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
                text = f"{self._server} gave no answer for sample {samples[0].sample_id!r} within {timeout_s:g} s"
                return [timed_out(samples[0].sample_id, text)]
            else:
                delay_s = self._retry.next_delay(failures, self._rng, now, Deadline())
                failures += 1
                if delay_s is None:
                    return self._failed(samples, f"failed {failures} times, last with {_text(error)}")
            await asyncio.sleep(delay_s)

    async def _call(
        self, request: pb.ScoreRequest, samples: Sequence[RewardSample], timeout_s: float
    ) -> list[RewardOutcome] | grpc.aio.AioRpcError:
        assert self._stub is not None
        async with self._calls:
            if self._channel is None:
                return self._failed(samples, "was not asked, for the client is closed")
            try:
                reply = cast("pb.ScoreResponse | None", await self._stub.Score(request, timeout=timeout_s))
                if reply is None:  # gRPC's word for bytes that cannot be read
                    return self._failed(samples, "answered with something that is no ScoreResponse")
                outcomes = outcomes_from_reply(samples, reply, self._server)
                return [msgspec.structs.replace(o, metrics=self._names.keep(o.metrics)) for o in outcomes]
            except grpc.aio.AioRpcError as error:
                return error
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._closed or (task is not None and task.cancelling()):
                    raise
                return self._failed(samples, "got no answer, for the client was closed")  # gRPC cancelled the call

    def _failed(self, samples: Sequence[RewardSample], what: str) -> list[RewardOutcome]:
        return [failed(s.sample_id, f"{self._server}, asked about sample {s.sample_id!r}, {what}") for s in samples]


def is_local(target: str) -> bool:
    """Whether a gRPC target is on this host, where no proxy has a place."""
    host = target.rpartition(":")[0].strip("[]")
    if target.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _text(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
