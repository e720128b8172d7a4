"""The worker's loop against a scripted hub over real gRPC and an engine that answers when the test says so."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from headrace.actors.rollout.rendering import IdsOnlyRenderer
from headrace.actors.rollout.worker import RolloutWorker
from headrace.engine.clock import SystemClock
from headrace.engine.config import Config
from headrace.engine.errors import PromptTooLongError, UsageError
from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.control import Progress
from headrace.engine.transport.convert import group_to_proto
from headrace.engine.transport.server import Service, serving
from headrace.engine.types import (
    AckStatus,
    FinishReason,
    GenerateRequest,
    PolicyVersion,
    Prompt,
    PromptGroup,
    SamplingParams,
    TokenChunk,
    UpdateKind,
    WeightAck,
    WeightManifest,
    WeightUpdate,
)
from headrace.v1 import control_pb2 as pb_control
from headrace.v1 import rollout_pb2 as pb
from headrace.v1 import rollout_pb2_grpc

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
GENERATED = pb.GroupEnded.STATUS_GENERATED


class GatedEngine:
    """Answers a request when its gate is open; a new version is served at once, or answered as the test says.

    Attributes:
        answers: What becomes of the next updates; SERVING when there is none.
        digest: Of what is served after a failure; 0 for a mixture.
        refusal: Raised for every request, if set.
    """

    def __init__(self) -> None:
        self.serving = V0
        self.asked: asyncio.Queue[str] = asyncio.Queue()
        self.gates: dict[str, asyncio.Event] = {}
        self.answers: list[AckStatus] = []
        self.digest = 0
        self.refusal: Exception | None = None

    def open(self, request_id: str) -> None:
        self.gates.setdefault(request_id, asyncio.Event()).set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        if self.refusal is not None:
            raise self.refusal
        gate = self.gates.setdefault(request.request_id, asyncio.Event())
        self.asked.put_nowait(request.request_id)
        await gate.wait()
        yield TokenChunk(
            token_ids=(7,),
            logprobs=(-1.0,),
            policy_version=self.serving,
            finish_reason=FinishReason.STOP,
        )

    async def apply(self, update: WeightUpdate) -> WeightAck:
        status = self.answers.pop(0) if self.answers else AckStatus.SERVING
        if status is not AckStatus.SERVING:
            return WeightAck(version=self.serving, status=status, digest=self.digest)
        self.serving = update.manifest.version
        return WeightAck(version=self.serving, status=AckStatus.SERVING, digest=0)


class WatchedProgress(Progress):
    """Lets a test wait until the worker says what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.said: asyncio.Queue[str] = asyncio.Queue()

    def moved(self, doing: str, phase: pb_control.Phase.ValueType | None = None) -> None:
        super().moved(doing, phase)
        self.said.put_nowait(doing)

    async def reaches(self, doing: str) -> None:
        while await asyncio.wait_for(self.said.get(), 30) != doing:
            pass


@dataclass
class KeepingBuffer:
    """Takes every record."""

    tables: list[str] = field(default_factory=list[str])

    async def put(self, table: str, records: list[Any]) -> list[Any]:
        self.tables += [table] * len(records)
        return []


class ScriptedHub(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self) -> None:
        self.commands: asyncio.Queue[pb.WorkResponse] = asyncio.Queue()
        self.ended: asyncio.Queue[pb.GroupEnded] = asyncio.Queue()

    async def Work(
        self, request_iterator: AsyncIterator[pb.WorkRequest], context: Any
    ) -> AsyncIterator[pb.WorkResponse]:
        async def read() -> None:
            async for request in request_iterator:
                if request.WhichOneof("event") == "group_ended":
                    self.ended.put_nowait(request.group_ended)

        reading = asyncio.create_task(read())
        try:
            while True:
                yield await self.commands.get()
        finally:
            reading.cancel()

    def send(self, group_id: str, attempt: int = 0) -> None:
        group = PromptGroup(
            group_id=group_id,
            prompt=Prompt(prompt_id=group_id, token_ids=(1, 2)),
            group_size=1,
            attempt=attempt,
            min_version=V0,
            sampling=SamplingParams(max_tokens=4),
        )
        self.commands.put_nowait(pb.WorkResponse(group=group_to_proto(group)))


@dataclass
class Bench:
    worker: RolloutWorker
    hub: ScriptedHub
    engine: GatedEngine
    progress: WatchedProgress


@contextlib.asynccontextmanager
async def working(tmp_path: Path, **rollout: Any) -> AsyncIterator[Bench]:
    hub, engine, progress = ScriptedHub(), GatedEngine(), WatchedProgress()
    config = Config()
    config = msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, max_tokens=4, **rollout))
    service = Service(
        name="headrace.v1.RolloutService",
        add=lambda server: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(hub, server),
    )
    async with serving([service], f"unix:{tmp_path}/s") as server, open_channel(server.address) as channel:
        worker = RolloutWorker(
            worker_id="w",
            config=config,
            backend=cast(Any, engine),
            renderer=IdsOnlyRenderer(),
            channel=channel,
            buffer=cast(Any, KeepingBuffer()),
            serving=V0,
            progress=progress,
            clock=SystemClock(),
            on_span=lambda _: None,
        )
        run = asyncio.create_task(worker.run())
        try:
            yield Bench(worker, hub, engine, progress)
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)


def update(version: PolicyVersion) -> WeightUpdate:
    manifest = WeightManifest(
        run_id="run",
        version=version,
        base=None,
        kind=UpdateKind.KEYFRAME,
        layout_hash=0,
        tensors=(),
        buckets=(),
        payload_bytes=0,
        digest=0,
    )
    return WeightUpdate(manifest=manifest, local_path="")


@pytest.mark.timeout(120)
async def test_an_update_between_rollouts_is_not_held_up_by_the_groups_that_wait_for_it(tmp_path: Path) -> None:
    async with working(tmp_path, partial_rollout=False) as bench:
        hub, engine = bench.hub, bench.engine
        hub.send("a")
        assert await engine.asked.get() == "a/0/0"
        applying = asyncio.create_task(bench.worker.apply(update(V1)))
        hub.send("b")  # the hub fills the free place while the update waits for "a"
        hub.send("c")
        engine.open("b/0/0")
        engine.open("c/0/0")
        await bench.progress.reaches("sampling 3 groups")
        assert engine.asked.empty() and engine.serving == V0
        engine.open("a/0/0")
        ack = await asyncio.wait_for(applying, 30)
        assert ack.version == V1
        ended = {(await asyncio.wait_for(hub.ended.get(), 30)).group_id for _ in range(3)}
        assert ended == {"a", "b", "c"}


@pytest.mark.timeout(120)
async def test_a_new_attempt_replaces_the_one_that_the_worker_still_runs(tmp_path: Path) -> None:
    async with working(tmp_path) as bench:
        hub, engine = bench.hub, bench.engine
        hub.send("a")
        assert await engine.asked.get() == "a/0/0"
        hub.send("a", attempt=1)  # overdue at the hub, and given to the same worker again
        assert await asyncio.wait_for(engine.asked.get(), 30) == "a/0/1"
        engine.open("a/0/1")
        ended = [await asyncio.wait_for(hub.ended.get(), 30) for _ in range(2)]
        assert [(end.attempt, end.status) for end in ended] == [(0, pb.GroupEnded.STATUS_ABORTED), (1, GENERATED)]


@pytest.mark.timeout(120)
async def test_after_an_update_that_failed_in_the_engine_groups_wait_for_one_that_is_served(tmp_path: Path) -> None:
    async with working(tmp_path) as bench:
        hub, engine = bench.hub, bench.engine
        engine.answers = [AckStatus.FAILED, AckStatus.CORRUPT]
        assert (await bench.worker.apply(update(V1))).status is AckStatus.FAILED
        hub.send("a")
        await bench.progress.reaches("sampling 1 groups")
        assert (await bench.worker.apply(update(V1))).status is AckStatus.CORRUPT  # changes nothing in the engine
        hub.send("b")
        await bench.progress.reaches("sampling 2 groups")
        assert engine.asked.empty() and hub.ended.empty()
        assert (await bench.worker.apply(update(V1))).version == V1
        assert {await asyncio.wait_for(engine.asked.get(), 30) for _ in range(2)} == {"a/0/0", "b/0/0"}


@pytest.mark.timeout(120)
async def test_a_delta_that_failed_and_was_taken_back_holds_nothing_back(tmp_path: Path) -> None:
    async with working(tmp_path) as bench:
        bench.engine.answers, bench.engine.digest = [AckStatus.FAILED], 5
        await bench.worker.apply(update(V1))
        bench.hub.send("a")
        assert await asyncio.wait_for(bench.engine.asked.get(), 30) == "a/0/0"


@pytest.mark.timeout(120)
async def test_an_update_that_is_refused_before_it_touches_the_engine_holds_nothing_back(tmp_path: Path) -> None:
    async with working(tmp_path) as bench:
        bench.engine.answers = [AckStatus.CORRUPT]
        await bench.worker.apply(update(V1))
        bench.hub.send("a")
        assert await asyncio.wait_for(bench.engine.asked.get(), 30) == "a/0/0"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (PromptTooLongError("200 tokens"), pb.GroupEnded.STATUS_PROMPT_TOO_LONG),
        (UsageError("no tokenizer for stop strings"), pb.GroupEnded.STATUS_FAILED),
    ],
)
async def test_only_a_prompt_that_is_too_long_is_called_so(
    tmp_path: Path, refusal: UsageError, status: pb.GroupEnded.Status.ValueType
) -> None:
    async with working(tmp_path) as bench:
        bench.engine.refusal = refusal
        bench.hub.send("a")
        ended = await asyncio.wait_for(bench.hub.ended.get(), 30)
        assert ended.status == status and str(refusal) in ended.message
