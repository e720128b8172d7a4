"""The process of one rollout worker: join, load the engine, work, follow the weight chain."""

import asyncio
import contextlib
import functools
import logging
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from headrace.actors.models import resolve_model
from headrace.actors.rollout.backends import choose_backend, create_backend
from headrace.actors.rollout.following import follow_weights
from headrace.actors.rollout.rendering import IdsOnlyRenderer, Renderer, TokenizerRenderer
from headrace.actors.rollout.worker import RolloutWorker
from headrace.engine.clock import SystemClock
from headrace.engine.interfaces import InferenceBackend
from headrace.engine.transport.buffer import BufferClient
from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.control import ControlClient, Joined, Span
from headrace.engine.types import AckStatus, PolicyVersion, WeightAck, WeightUpdate
from headrace.v1 import control_pb2 as pb

log = logging.getLogger(__name__)

_REPORT_S = 1.0

StartEngine = Callable[[ControlClient, Joined], Awaitable[tuple[InferenceBackend, Renderer, PolicyVersion]]]


def main(hub: str, worker_id: str, rank: int = 0, same_host: bool = True) -> None:
    """Run a rollout worker until the hub drains it. Entry of the child process.

    Args:
        hub: Address of the hub.
        worker_id: Unique within the run.
        rank: Counts the workers of the run.
        same_host: The hub shares our file system.

    Raises:
        ActorLostError: The hub or the inference engine is gone.
        ConfigError: The model cannot be loaded.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    asyncio.run(run_worker(hub, worker_id, rank, same_host=same_host))


async def run_worker(
    hub: str, worker_id: str, rank: int = 0, *, same_host: bool = True, start_engine: StartEngine | None = None
) -> None:
    """Run a rollout worker on this event loop until the hub drains it. Cancelling ends it and its engine.

    Args:
        hub, worker_id, rank, same_host: See `main`.
        start_engine: Makes and starts the engine and its renderer, and names the version that it serves; by default the
            backend that the configuration asks for.

    Raises:
        ActorLostError: The hub or the inference engine is gone.
        ConfigError: The model cannot be loaded.
    """
    async with open_channel(hub) as channel:
        control = ControlClient(channel, pb.ROLE_ROLLOUT, worker_id)
        run = await control.join(rank)
        control.progress.moved("loading the model", pb.PHASE_LOADING)
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(control.heartbeats(), name="heartbeats")
            working = tasks.create_task(
                _work(hub, control=control, run=run, same_host=same_host, start_engine=start_engine or start_configured)
            )
            await asyncio.wait({beating, working}, return_when=asyncio.FIRST_COMPLETED)
            working.cancel()
            beating.cancel()
        await control.leave("drained")


async def _work(hub: str, *, control: ControlClient, run: Joined, same_host: bool, start_engine: StartEngine) -> None:
    """Start the engine and serve until drained."""
    backend, renderer, serving = await start_engine(control, run)
    spans: list[Span] = []
    async with open_channel(hub) as channel, contextlib.aclosing(BufferClient(channel, control.member_id)) as buffer:
        worker = RolloutWorker(
            worker_id=control.member_id,
            config=run.config,
            backend=backend,
            renderer=renderer,
            channel=channel,
            buffer=buffer,
            serving=serving,
            progress=control.progress,
            clock=SystemClock(),
            on_span=spans.append,
        )
        # On the hub's host the hub removes what a killed worker leaves here.
        parent = run.payload_dir if same_host else None
        with tempfile.TemporaryDirectory(prefix="headrace-fetch-", dir=parent) as folder:
            apply = functools.partial(_apply, worker, control)
            following = asyncio.create_task(
                follow_weights(
                    channel, run, control.member_id, serving, apply, same_host=same_host, folder=Path(folder)
                ),
                name="weights",
            )
            reporting = asyncio.create_task(_report(control, spans), name="reports")
            working = asyncio.create_task(worker.run(), name="groups")
            try:
                # A subscription that ends without an error means that the run is ending: what is running is finished.
                pending = {following, reporting, working}
                while working in pending:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
            finally:
                for task in (following, reporting, working):
                    task.cancel()
                await asyncio.gather(following, reporting, working, return_exceptions=True)
                await backend.close()


async def start_configured(control: ControlClient, run: Joined) -> tuple[InferenceBackend, Renderer, PolicyVersion]:
    """Load the model; the engine serves the base weights under the version that they have."""
    started_s = time.monotonic()
    # A resumed run's weights are not the base model's: its engines wait for the first keyframe.
    base = PolicyVersion(run.incarnation, 0) if not run.resume_from else PolicyVersion(0, 0)
    name, why = choose_backend(run.config)
    control.progress.say(f"rollouts use {name}: {why}")
    scripted = name == "scripted"
    model_dir = Path() if scripted else await asyncio.to_thread(resolve_model, run.config.model.path)
    backend = create_backend(run.config, model_dir, base)
    renderer: Renderer = IdsOnlyRenderer() if scripted else await asyncio.to_thread(TokenizerRenderer, model_dir)
    await backend.start()
    control.progress.say(f"engine {name} ready in {time.monotonic() - started_s:.1f} s")
    control.progress.moved("waiting for groups", pb.PHASE_READY)
    return backend, renderer, base


async def _apply(worker: RolloutWorker, control: ControlClient, update: WeightUpdate) -> WeightAck:
    ack = await worker.apply(update)
    if ack.status is not AckStatus.SERVING:
        log.error("weights %s were not taken: %s", update.manifest.version, ack.message)
    control.progress.moved(f"serving version {ack.version}")
    return ack


async def _report(control: ControlClient, spans: list[Span]) -> None:
    while True:
        await asyncio.sleep(_REPORT_S)
        if spans:
            batch, spans[:] = list(spans), []
            await control.report(spans=batch)
