"""Serves any `Reward` as headrace.v1.RewardService.

Invariants:
- A reply holds one outcome a sample, in order, whatever the scorer does.
- A sample that is unfinished shortly before the call's deadline is TIMEOUT; the finished ones arrive all the same where
  the reward is a `StreamingReward`.
- One idempotency key is scored once: a retry joins the running work, or gets the remembered outcomes.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from headrace.engine.errors import HeadraceError, UsageError
from headrace.engine.interfaces import Reward
from headrace.engine.transport.reward_convert import failed, outcome_to_proto, read_samples, timed_out
from headrace.engine.transport.server import Service
from headrace.engine.types import RewardOutcome, RewardSample
from headrace.v1 import reward_pb2 as pb
from headrace.v1 import reward_pb2_grpc

if TYPE_CHECKING:
    import grpc.aio

    Context = grpc.aio.ServicerContext[Any, Any]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["RewardService"].full_name
_MAX_REMEMBERED = 1024
_MAX_STREAM_IN_FLIGHT = 256


@runtime_checkable
class StreamingReward(Protocol):
    """A reward that tells its outcomes one by one, so that a deadline loses only what is unfinished."""

    def outcomes(self, batch: Sequence[RewardSample]) -> AsyncGenerator[tuple[int, RewardOutcome], None]:
        """Yield (index in the batch, outcome) as they are ready. Closing the iterator gives up the rest."""
        ...


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Exposes a reward over gRPC. Streaming and idempotency are its own; the reward only scores."""

    def __init__(
        self,
        reward: Reward,
        *,
        name: str,
        version: str = "",
        max_batch: int = 0,
        max_concurrency: int = 0,
        default_timeout_s: float = 600.0,
    ) -> None:
        """Serve `reward`; the caller starts and closes it.

        Args:
            reward: Where it is a `StreamingReward`, a deadline loses only unfinished samples.
            name: What `Describe` says.
            version: What `Describe` says.
            max_batch: Larger batches are refused with INVALID_ARGUMENT; 0 is no limit.
            max_concurrency: What `Describe` says; 0 is not known.
            default_timeout_s: For calls without a deadline.
        """
        self._reward = reward
        self._description = pb.DescribeResponse(
            name=name, version=version, max_batch=max_batch, max_concurrency=max_concurrency
        )
        self._default_timeout_s = default_timeout_s
        self._remembered: OrderedDict[str, tuple[tuple[str, ...], asyncio.Task[pb.ScoreResponse]]] = OrderedDict()

    def service(self) -> Service:
        """What a `GrpcServer` needs to serve this."""
        return Service(
            name=SERVICE_NAME,
            add=lambda server: reward_pb2_grpc.add_RewardServiceServicer_to_server(self, server),
        )

    async def Score(self, request: pb.ScoreRequest, context: "Context") -> pb.ScoreResponse:
        """Score a batch within the call's deadline. With an idempotency key the work outlives a lost connection.

        Raises:
            UsageError: The batch is larger than `max_batch`, or a key comes back with other samples.
        """
        limit = self._description.max_batch
        if limit and len(request.samples) > limit:
            raise UsageError(f"a batch of {len(request.samples)} samples was sent; this server takes at most {limit}")
        timeout_s = self._time_left(context)
        if not request.idempotency_key:
            return await self._score(request.samples, timeout_s)
        return await asyncio.shield(self._score_once(request, timeout_s))

    async def ScoreStream(
        self, request_iterator: AsyncIterator[pb.ScoreStreamRequest], context: "Context"
    ) -> AsyncIterator[pb.ScoreStreamResponse]:
        """Score samples as they come; reads on only while fewer than 256 are unfinished."""
        timeout_s = self._time_left(context)
        room = asyncio.Semaphore(_MAX_STREAM_IN_FLIGHT)
        answers: asyncio.Queue[pb.ScoreStreamResponse | None] = asyncio.Queue()

        async def score_one(message: pb.RewardSample) -> None:
            reply = await self._score([message], timeout_s)
            answers.put_nowait(pb.ScoreStreamResponse(outcome=reply.outcomes[0]))
            room.release()

        async def read_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    async for request in request_iterator:
                        await room.acquire()
                        group.create_task(score_one(request.sample))
            finally:
                answers.put_nowait(None)

        reading = asyncio.create_task(read_all())
        try:
            while (answer := await answers.get()) is not None:
                yield answer
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def Describe(self, request: pb.DescribeRequest, context: "Context") -> pb.DescribeResponse:
        """What this server is and what it can take."""
        return self._description

    async def close(self) -> None:
        """Give up work that was kept alive for retries; the reward stays open. May be called twice."""
        tasks = [task for _, task in self._remembered.values()]
        self._remembered.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _time_left(self, context: "Context") -> float:
        """Seconds until the reply must be under way: a little less than the call has."""
        left_s = context.time_remaining()
        if left_s is None:  # pyright: ignore[reportUnnecessaryComparison]  # so it is without a deadline
            return self._default_timeout_s
        return max(0.0, left_s - min(0.25, 0.1 * left_s))

    def _score_once(self, request: pb.ScoreRequest, timeout_s: float) -> "asyncio.Task[pb.ScoreResponse]":
        key, ids = request.idempotency_key, tuple(sample.sample_id for sample in request.samples)
        if key in self._remembered:
            known_ids, task = self._remembered[key]
            if known_ids != ids:
                raise UsageError(
                    f"idempotency_key {key!r} was used for {len(known_ids)} other samples; give each batch its own"
                )
            return task
        task = asyncio.create_task(self._score(request.samples, timeout_s))
        self._remembered[key] = (ids, task)
        task.add_done_callback(lambda done: self._forget_failure(key, done))
        if len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)  # where it still runs its caller awaits it all the same
        return task

    def _forget_failure(self, key: str, task: "asyncio.Task[pb.ScoreResponse]") -> None:
        if (task.cancelled() or task.exception() is not None) and self._remembered.get(key, ((), None))[1] is task:
            del self._remembered[key]

    async def _score(self, messages: Sequence[pb.RewardSample], timeout_s: float) -> pb.ScoreResponse:
        read = read_samples(messages)
        outcomes = {index: item for index, item in enumerate(read) if isinstance(item, RewardOutcome)}
        places = [index for index, item in enumerate(read) if isinstance(item, RewardSample)]
        samples = [item for item in read if isinstance(item, RewardSample)]
        reason = ""
        try:
            async with asyncio.timeout(timeout_s), contextlib.aclosing(self._outcomes(samples)) as answers:
                async for index, outcome in answers:
                    outcomes[places[index]] = outcome
        except TimeoutError:
            pass  # recorded below, sample by sample
        except HeadraceError as error:
            reason = str(error)
        for index, sample in zip(places, samples, strict=True):
            if index not in outcomes and reason:
                outcomes[index] = failed(sample.sample_id, f"scoring sample {sample.sample_id!r} failed: {reason}")
            elif index not in outcomes:
                text = f"sample {sample.sample_id!r} was not scored within the {timeout_s:.3g} s that its call had left"
                outcomes[index] = timed_out(sample.sample_id, text)
        return pb.ScoreResponse(outcomes=[outcome_to_proto(outcomes[index]) for index in range(len(read))])

    async def _outcomes(self, samples: Sequence[RewardSample]) -> AsyncGenerator[tuple[int, RewardOutcome], None]:
        if isinstance(self._reward, StreamingReward):
            async with contextlib.aclosing(self._reward.outcomes(samples)) as answers:
                async for answer in answers:
                    yield answer
        else:
            for index, outcome in enumerate(await self._reward.score(samples)):
                yield index, outcome
