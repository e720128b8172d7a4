"""The whole engine with scripted actors: real hub, real gRPC, real buffer, no model."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from headrace.actors.learner.loop import LearnerLoop, step_batch
from headrace.actors.rollout.main import run_worker
from headrace.actors.rollout.rendering import Renderer
from headrace.clients.engine import Engine
from headrace.clients.trainer import TrainerClient
from headrace.engine.clock import SystemClock
from headrace.engine.config import Config, load_config
from headrace.engine.interfaces import InferenceBackend, TrainerBackend
from headrace.engine.testing import FixedLength, ScriptedInferenceBackend, ScriptedTrainer, random_script
from headrace.engine.transport.control import BlockingControlClient, ControlClient, Joined
from headrace.engine.transport.learner import LearnerClient
from headrace.engine.types import PolicyVersion, Prompt
from headrace.v1 import control_pb2 as pb

CONFIG = """
[run]
name = "scripted"
folder = "{folder}/runs"
steps = {steps}
hub = "{hub}"
[model]
path = "scripted"
[data]
source = "jsonl"
path = "{folder}/prompts.jsonl"
[schedule]
groups_per_step = 2
group_size = 4
max_staleness = {max_staleness}
[rollout]
backend = "scripted"
launch = "external"
max_tokens = 16
max_num_seqs = 8
[learner]
launch = "external"
[reward]
function = "reward_of_the_test:score"
timeout_s = 5
[eval]
num_prompts = {num_eval}
path = "{folder}/held_out.jsonl"
[timeouts]
start_s = 30
stop_s = 3
no_progress_s = 30
"""

REWARD = """
def score(prompt, response, data):
    return float(sum(map(int, response.split())) % 7)
"""


class LettersRenderer:
    """One id a character."""

    def render(self, prompt: Prompt) -> tuple[int, ...]:
        text = prompt.text or "".join(message.content for message in prompt.messages)
        return tuple(ord(letter) % 500 + 1 for letter in text)

    def text_of(self, token_ids: "list[int] | tuple[int, ...]") -> str:
        return " ".join(map(str, token_ids))


def configuration(folder: Path, **values: object) -> Config:
    settings = {"steps": 3, "hub": "inproc", "max_staleness": 1, "num_eval": 0} | values
    lines = [msgspec.json.encode({"prompt": f"prompt number {n}", "answer": n}) for n in range(64)]
    (folder / "prompts.jsonl").write_bytes(b"\n".join(lines))
    held_out = [msgspec.json.encode({"prompt": f"held out {n}", "answer": n}) for n in range(8)]
    (folder / "held_out.jsonl").write_bytes(b"\n".join(held_out))
    (folder / "reward_of_the_test.py").write_text(REWARD)
    return load_config(None, text=CONFIG.format(folder=folder, **settings))


async def scripted_engine(control: ControlClient, run: Joined) -> tuple[InferenceBackend, Renderer, PolicyVersion]:
    backend = ScriptedInferenceBackend(random_script(FixedLength(num_tokens=5)), version=run.version)
    await backend.start()
    control.progress.moved("waiting for groups", pb.PHASE_READY)
    return backend, LettersRenderer(), run.version


class NoCheckpoints:
    def save(self, trainer: TrainerBackend, step: int) -> None:
        return


def learn(hub: str, folder: Path, failures: list[BaseException]) -> None:
    """A learner rank in a thread, with a scripted trainer."""
    try:
        with BlockingControlClient(hub, pb.ROLE_LEARNER, "learner-0") as control:
            run = control.join(0)
            line = LearnerClient(hub, control, run, 0, 1)
            loop = LearnerLoop(
                config=run.config,
                trainer=ScriptedTrainer(run_id=run.run_id),
                hub=line,
                checkpoints=NoCheckpoints(),
                payload_dirs=(Path(run.payload_dir), folder),
                rank=0,
                clock=SystemClock(),
            )
            loop.run(run.version.version, publish_first=False)
            line.close()
    except BaseException as error:
        failures.append(error)


@asynccontextmanager
async def actors(engine: Engine, folder: Path) -> AsyncIterator[list[BaseException]]:
    failures: list[BaseException] = []
    worker = asyncio.create_task(run_worker(engine.hub_address, "rollout-0", start_engine=scripted_engine))
    thread = threading.Thread(target=learn, args=(engine.hub_address, folder, failures), daemon=True)
    thread.start()
    try:
        yield failures
    finally:
        await asyncio.to_thread(thread.join, 60)
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


def rows(run_folder: Path) -> list[dict[str, float]]:
    return [msgspec.json.decode(line) for line in (run_folder / "metrics.jsonl").read_bytes().splitlines()]


@pytest.mark.parametrize("hub", ["inproc", "process"])
async def test_a_run_trains_every_step_and_writes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: str
) -> None:
    config = configuration(tmp_path, hub=hub, num_eval=5)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with Engine(config) as engine, actors(engine, tmp_path) as failures:
        result = await asyncio.wait_for(engine.wait(), 120)
    assert not failures
    assert (result.ended, result.steps, result.error) == ("finished", 3, None)
    found = rows(engine.run_folder)
    assert [row["step"] for row in found if "critic/rewards/mean" in row] == [1, 2, 3]
    assert [row["step"] for row in found if "eval/held_out/avg@1" in row] == [0, 3]
    assert all(row["off_policy/max"] <= 1 for row in found if "off_policy/max" in row)
    for name in ("config.toml", "samples.jsonl", "timeline.json", "log.txt"):
        assert (engine.run_folder / name).exists(), name


def train_by_hand(hub: str, folder: Path, seen: list[str], failures: list[BaseException]) -> None:
    """A training loop of somebody else's, on the blocking client."""
    try:
        with TrainerClient(hub) as client:
            trainer = ScriptedTrainer(run_id=client.run.run_id)
            for step in range(client.first_step, client.num_steps):
                batch = client.take(step)
                assert client.take(step).lease_token == batch.lease_token
                samples = client.samples(batch)
                seen.extend(sample.trajectory.record_id for sample in samples)
                assert all(sample.advantage != 0 for sample in samples)
                # Nothing is learned here, but each version needs weights of its own.
                trainer.step(step_batch(step, batch))
                client.commit(step, batch.lease_token)
                client.publish(trainer.export_update(None, folder))
                client.report(step + 1, {"actor/lr": 0.1})
    except BaseException as error:
        failures.append(error)


async def test_a_training_loop_of_ones_own_drives_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seen: list[str] = []
    failures: list[BaseException] = []
    async with Engine(config) as engine:
        worker = asyncio.create_task(run_worker(engine.hub_address, "rollout-0", start_engine=scripted_engine))
        arguments = (engine.hub_address, tmp_path, seen, failures)
        thread = threading.Thread(target=train_by_hand, args=arguments, daemon=True)
        thread.start()
        result = await asyncio.wait_for(engine.wait(), 120)
        await asyncio.to_thread(thread.join, 60)
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    assert not failures
    assert (result.ended, result.steps) == ("finished", 3)
    assert len(seen) == len(set(seen)) > 0
