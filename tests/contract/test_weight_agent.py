"""Hub, agent and receivers over gRPC, under faults: all receivers come to the newest weights, none to a mixture."""

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from headrace.actors.rollout.following import follow_weights
from headrace.buffers.async_table import AsyncTable
from headrace.buffers.table import Table
from headrace.engine.clock import SystemClock
from headrace.engine.config import Config
from headrace.engine.errors import ActorLostError, UsageError, WeightUpdateError
from headrace.engine.hub.flow import GroupFlow
from headrace.engine.hub.members import Limits, Members
from headrace.engine.hub.reporting import Reporting
from headrace.engine.hub.state import HubState
from headrace.engine.hub.streak import FailureStreak
from headrace.engine.hub.waits import Changes, WaitBoard
from headrace.engine.hub.weights import WeightHub
from headrace.engine.supervision.child import Child
from headrace.engine.supervision.guardian import Guardian
from headrace.engine.telemetry.run_folder import RunFolder
from headrace.engine.testing.plain_weights import PlainReceiver, PlainSender
from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.control import Joined
from headrace.engine.transport.server import Service, serving
from headrace.engine.transport.weight_subscriber import WeightSubscriber
from headrace.engine.transport.weights import WeightPublisher
from headrace.engine.types import PolicyVersion, UpdateKind, WeightAck, WeightUpdate
from headrace.engine.weights.agent import WeightAgent
from headrace.engine.weights.agent_service import agent_service
from headrace.v1 import weights_pb2 as pb
from headrace.v1 import weights_pb2_grpc

START = PolicyVersion(0, 0)
FAULTS = ("drop", "double", "swap", "cut", "damage", "break")


class FaultyHub(weights_pb2_grpc.WeightServiceServicer):
    """The hub's service on a line that harms frames on their way to a receiver."""

    def __init__(self, hub: WeightHub, rng: random.Random) -> None:
        self.rate = 0.0
        self._rng = rng
        self._hub = hub
        self.Publish = hub.Publish  # type: ignore[method-assign]
        self.Subscribe = hub.Subscribe  # type: ignore[method-assign]
        self.Acknowledge = hub.Acknowledge  # type: ignore[method-assign]
        self.ReportWaits = hub.ReportWaits  # type: ignore[method-assign]

    async def Fetch(self, request: pb.FetchRequest, context: object) -> AsyncIterator[pb.FetchResponse]:
        fault = self._rng.choice(FAULTS) if self._rng.random() < self.rate else ""
        frames = [frame async for frame in self._hub.Fetch(request, context)]  # type: ignore[arg-type]
        place = self._rng.randrange(len(frames))
        frame = frames[place]
        match fault:
            case "drop":
                del frames[place]
            case "double":
                frames.insert(place, frame)
            case "swap":
                frames[place : place + 2] = reversed(frames[place : place + 2])
            case "cut":
                frame.data = frame.data[:-1]
            case "damage":
                frame.data = bytes([frame.data[0] ^ 4]) + frame.data[1:]
            case "break":
                del frames[place:]
        for sent in frames:
            yield sent
        if fault == "break":
            raise WeightUpdateError("not held any more") if self._rng.random() < 0.2 else ActorLostError("broken")


@dataclass
class Host:
    """A run: its hub, and what a sender has published."""

    folder: Path
    state: HubState
    hub: FaultyHub
    address: str
    sender: PlainSender
    publisher: WeightPublisher
    newest: PolicyVersion = START
    digests: dict[PolicyVersion, int] = field(default_factory=dict[PolicyVersion, int])

    @property
    def agent_address(self) -> str:
        return f"unix:{self.folder}/agent"

    async def publish(self, *, full: bool = False, streamed: bool = False) -> None:
        self.sender.step()
        self.newest = PolicyVersion(self.newest.incarnation, self.newest.version + 1)
        part = self.sender.part(self.newest, self.folder / "payloads", full=full)
        assert await asyncio.to_thread(lambda: self.publisher.publish(part, same_host=not streamed))
        self.sender.settle(accepted=True)
        self.digests[self.newest] = part.manifest.digest

    def resume(self, seed: int) -> None:
        """The trainer begins anew, from other weights, as another incarnation."""
        self.newest = PolicyVersion(self.newest.incarnation + 1, max(0, self.newest.version - 2))
        self.sender = PlainSender(seed, keyframe_steps=8)

    def joined(self) -> Joined:
        return Joined(
            run_id="run",
            incarnation=0,
            config=self.state.config,
            version=START,
            fencing_token=1,
            resume_from="",
            run_folder="",
            payload_dir=str(self.folder / "payloads"),
            agent_address=self.agent_address,
        )

    @contextlib.asynccontextmanager
    async def agent(self, *, same_host: bool = True) -> AsyncIterator[WeightAgent]:
        folder = self.folder / "agent-0"
        async with open_channel(self.address) as channel:
            subscriber = WeightSubscriber(
                channel,
                run_id="run",
                receiver_id="agent-0",
                same_host=same_host,
                folder=folder,
                deltas=True,
                agent=True,
            )
            agent = WeightAgent(subscriber, folder, "run")
            following = asyncio.create_task(agent.follow())
            try:
                async with serving([agent_service(agent)], self.agent_address):
                    yield agent
            finally:
                following.cancel()
                (error,) = await asyncio.gather(following, return_exceptions=True)
                await asyncio.to_thread(agent.close)
                assert error is None or isinstance(error, asyncio.CancelledError), error


@contextlib.asynccontextmanager
async def running(tmp_path: Path, seed: int = 1) -> AsyncIterator[Host]:
    clock = SystemClock()
    board = WaitBoard(clock)
    config = Config()
    state = HubState(
        run_id="run",
        config=config,
        clock=clock,
        board=board,
        changes=Changes(clock, board),
        flow=GroupFlow(config, START, clock),
        members=Members(Limits(silent_s=60, loading_s=60, working_s=60)),
        reporting=Reporting(RunFolder.create(tmp_path / "runs", "run", "", clock.wall()), clock),
        streak=FailureStreak(1),
        train=AsyncTable(Table("train")),
        evals=AsyncTable(Table("eval")),
        version=START,
    )
    for name in ("payloads", "fetched"):
        (tmp_path / name).mkdir()
    hub = FaultyHub(WeightHub(state, tmp_path / "payloads"), random.Random(seed))
    service = Service(
        name="headrace.v1.WeightService",
        add=lambda server: weights_pb2_grpc.add_WeightServiceServicer_to_server(hub, server),
    )
    async with serving([service], f"unix:{tmp_path}/hub") as server:
        publisher = WeightPublisher(server.address, rank=0, num_ranks=1, fencing_token=1)
        sender = PlainSender(seed, keyframe_steps=8)
        yield Host(tmp_path, state, hub, server.address, sender, publisher)
        publisher.close()
        state.end("finished")
    state.reporting.close()
    state.reporting.folder.close()


class Worker:
    """A receiver and its task; each update that it takes is compared with what was published under that version."""

    def __init__(self, host: Host, name: str, harm: Callable[[], bool] = lambda: False) -> None:
        self.host, self.name, self.harm = host, name, harm
        self.receiver = PlainReceiver(START)
        self.gate = asyncio.Event()
        self.gate.set()
        self.moved = asyncio.Event()
        self.staged = asyncio.Event()
        self.task = self.begin()

    def begin(self) -> asyncio.Task[None]:
        async def follow() -> None:
            async with open_channel(self.host.address) as hub:
                await follow_weights(
                    hub,
                    self.host.joined(),
                    self.name,
                    self.receiver.version,
                    self.apply,
                    same_host=True,
                    folder=self.host.folder,
                )

        return asyncio.create_task(follow(), name=self.name)

    async def apply(self, update: WeightUpdate) -> WeightAck:
        if self.harm():
            update = msgspec.structs.replace(update, local_path=str(self.host.folder / "absent"))
        refused = self.receiver.stage(update)
        self.staged.set()
        await self.gate.wait()
        if refused is not None:
            return refused
        before = self.receiver.version
        ack = self.receiver.apply()
        assert ack.version >= before
        assert ack.digest == self.host.digests[ack.version]
        self.moved.set()
        return ack

    async def reach(self, version: PolicyVersion) -> None:
        async with asyncio.timeout(20):
            while self.receiver.version != version:
                self.moved.clear()
                waiting = asyncio.create_task(self.moved.wait())
                done, _ = await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if self.task in done:
                    self.task.result()
                    raise AssertionError(f"{self.name} ended before it served {version}")

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def come_back(self) -> None:
        """A new process of the same name, with nothing."""
        await self.kill()
        self.receiver = PlainReceiver(START)
        self.task = self.begin()


@contextlib.asynccontextmanager
async def workers(host: Host, number: int = 1, **options: Callable[[], bool]) -> AsyncIterator[list[Worker]]:
    started = [Worker(host, f"rollout-{index}", **options) for index in range(number)]
    try:
        yield started
    finally:
        for worker in started:
            await worker.kill()


async def run_under_faults(tmp_path: Path, num_updates: int, seed: int) -> None:
    rng = random.Random(seed)
    async with running(tmp_path, seed) as host, contextlib.AsyncExitStack() as agents:
        host.hub.rate = 0.3
        await agents.enter_async_context(host.agent(same_host=False))
        async with workers(host, 3, harm=lambda: rng.random() < 0.05) as receivers:
            for number in range(num_updates):
                await host.publish(full=rng.random() < 0.05, streamed=rng.random() < 0.3)
                event = rng.random()
                if event < 0.05:
                    await rng.choice(receivers).come_back()
                elif event < 0.08:
                    await agents.aclose()
                    await agents.enter_async_context(host.agent(same_host=False))
                elif event < 0.1:
                    host.resume(seed + number)
                elif event < 0.3:
                    await rng.choice(receivers).reach(host.newest)
            await host.publish()
            for worker in receivers:
                await worker.reach(host.newest)
            kinds = [kind for worker in receivers for kind in worker.receiver.applied]
            assert UpdateKind.DELTA in kinds
        await agents.aclose()


async def test_sixty_updates_under_faults_reach_every_receiver_unharmed(tmp_path: Path) -> None:
    await run_under_faults(tmp_path, 60, seed=3)


@pytest.mark.full
@pytest.mark.parametrize("seed", [5, 6])
async def test_five_hundred_updates_under_faults_reach_every_receiver_unharmed(tmp_path: Path, seed: int) -> None:
    await run_under_faults(tmp_path, 500, seed)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_receiver_that_lags_takes_one_change_and_none_twice(tmp_path: Path) -> None:
    async with running(tmp_path) as host, host.agent() as agent, workers(host) as (worker,):
        await host.publish()
        await worker.reach(host.newest)
        worker.gate.clear()
        worker.staged.clear()
        await host.publish()
        await worker.staged.wait()
        for _ in range(4):
            await host.publish()
        await until(lambda: agent.version == host.newest)
        worker.gate.set()
        await worker.reach(host.newest)
        assert worker.receiver.applied == [UpdateKind.KEYFRAME, UpdateKind.DELTA, UpdateKind.DELTA]


async def test_a_late_joiner_takes_the_whole_state_and_then_deltas(tmp_path: Path) -> None:
    async with running(tmp_path) as host, host.agent(), workers(host) as (early,):
        for _ in range(3):
            await host.publish()
        await early.reach(host.newest)
        async with workers(host, 2) as (_, late):
            await late.reach(host.newest)
            await host.publish()
            await late.reach(host.newest)
            assert late.receiver.applied == [UpdateKind.KEYFRAME, UpdateKind.DELTA]


async def test_a_receiver_killed_between_staging_and_applying_begins_anew(tmp_path: Path) -> None:
    async with running(tmp_path) as host, host.agent(), workers(host) as (worker,):
        await host.publish()
        await worker.reach(host.newest)
        worker.gate.clear()
        worker.staged.clear()
        await host.publish()
        await worker.staged.wait()
        assert worker.receiver.version != host.newest
        worker.gate.set()
        await worker.come_back()
        await worker.reach(host.newest)
        assert worker.receiver.applied == [UpdateKind.KEYFRAME]


async def test_a_keyframe_reaches_receivers_that_follow_as_a_change(tmp_path: Path) -> None:
    async with running(tmp_path) as host, host.agent(), workers(host) as (worker,):
        for full in (True, True, True):
            await host.publish(full=full)
            await worker.reach(host.newest)
        assert worker.receiver.applied == [UpdateKind.KEYFRAME, UpdateKind.DELTA, UpdateKind.DELTA]


async def test_a_resumed_trainer_takes_all_receivers_to_its_incarnation(tmp_path: Path) -> None:
    async with running(tmp_path) as host, host.agent(), workers(host, 2) as receivers:
        for _ in range(3):
            await host.publish()
        for worker in receivers:
            await worker.reach(host.newest)
        host.resume(9)
        for _ in range(2):
            await host.publish()
            for worker in receivers:
                await worker.reach(host.newest)
        assert host.newest == PolicyVersion(1, 3)


async def test_the_hub_hears_what_receivers_answer(tmp_path: Path) -> None:
    harms = iter([False, True, False, False])
    async with (
        running(tmp_path) as host,
        host.agent(same_host=False),
        workers(host, harm=lambda: next(harms, False)) as (worker,),
    ):
        for _ in range(2):
            await host.publish()
            await worker.reach(host.newest)
        values = host.state.reporting.parts.take()
        assert values["weights/lag"] in (0, 1)  # the next version may have come before the answer
        assert values["weights/fetch_s"] > 0
    log = (host.state.reporting.folder.path / "log.txt").read_text()
    assert log.count("rollout-0 goes on with version 1: corrupt:") == 1


async def test_the_hub_can_say_who_waits_for_weights(tmp_path: Path) -> None:
    async with running(tmp_path) as host:

        def waiting() -> set[str]:
            return {wait.member for wait in host.state.board.listing() if wait.waits_for == "a newer version"}

        async with host.agent():
            async with workers(host, 2) as (worker, _):
                await until(lambda: waiting() == {"agent-0", "rollout-0", "rollout-1"})
                worker.gate.clear()
                await host.publish()
                await until(lambda: waiting() == {"agent-0", "rollout-1"})
                worker.gate.set()
                await until(lambda: waiting() == {"agent-0", "rollout-0", "rollout-1"})
            await until(lambda: waiting() == {"agent-0"})
        await until(lambda: waiting() == set())


async def test_a_receiver_that_fails_again_and_again_is_given_up(tmp_path: Path) -> None:
    async with running(tmp_path) as host, host.agent(), workers(host, harm=lambda: True) as (worker,):
        await host.publish()
        with pytest.raises(WeightUpdateError, match="3 updates in a row"):
            await asyncio.wait_for(worker.task, 30)


async def test_a_damaged_copy_is_replaced_by_the_next_keyframe_and_nobody_serves_it(tmp_path: Path) -> None:
    async with running(tmp_path) as host, host.agent() as agent, workers(host) as (worker,):
        for _ in range(2):
            await host.publish()
            await worker.reach(host.newest)
        agent._files.shadow.read(0, 7, 1)[0] ^= 1
        await worker.come_back()  # asks for the whole state, which shows the damage
        await worker.reach(host.newest)
        assert worker.receiver.digest == host.digests[host.newest]


async def test_an_agent_serves_receivers_of_its_own_run_and_host_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as host, host.agent(), open_channel(host.agent_address) as channel:
        for run_id, same_host in (("other", True), ("run", False)):
            subscriber = WeightSubscriber(
                channel, run_id=run_id, receiver_id="r", same_host=same_host, folder=tmp_path, patient=True
            )
            with pytest.raises(UsageError, match="subscribe at the hub"):
                await anext(subscriber.updates(None))
        publisher = WeightPublisher(host.agent_address, rank=0, num_ranks=1, fencing_token=1)
        with pytest.raises(UsageError, match="published at the hub"):
            await asyncio.to_thread(publisher.publish, host.sender.part(PolicyVersion(0, 1), tmp_path))
        publisher.close()


async def test_an_agent_that_is_killed_and_started_anew_goes_on_where_receivers_are(tmp_path: Path) -> None:
    guardian = Guardian()
    arguments = {
        "run_id": "run",
        "agent_id": "agent-0",
        "folder": str(tmp_path / "payloads" / "agent-0"),
    }

    async with running(tmp_path) as host:

        def start() -> Child:
            return Child.spawn(
                "agent-0",
                "headrace.engine.weights.agent_service:main",
                {**arguments, "hub": host.address, "address": host.agent_address},
                guardian=guardian,
                log_folder=tmp_path,
            )

        child = start()
        async with workers(host, 2) as receivers:
            for _ in range(2):
                await host.publish()
                for worker in receivers:
                    await worker.reach(host.newest)
            child.kill()
            assert await child.wait() == -signal.SIGKILL
            await host.publish()
            child = start()
            for worker in receivers:
                await worker.reach(host.newest)
            await host.publish()
            for worker in receivers:
                await worker.reach(host.newest)
                # From what they had when it died, the whole state was never needed again.
                assert worker.receiver.applied == [UpdateKind.KEYFRAME] + [UpdateKind.DELTA] * 3
            host.state.end("finished")
            assert await asyncio.wait_for(child.wait(), 30) == 0
            for worker in receivers:
                await asyncio.wait_for(worker.task, 30)
    await asyncio.to_thread(guardian.close)
