"""Signals, and the death of every process of a run, from outside."""

import os
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import msgspec
import pytest

pytestmark = pytest.mark.timeout(300)

Train = Any  # the fixture of conftest.py

SLOW_REWARD = "import time\ndef score(prompt, response, data):\n    time.sleep(4)\n    return 1.0\n"
EVALUATED = ("--eval.num_prompts=4", "--eval.path=prompts.jsonl")
LONG = ("--rollout.max_tokens=200000", "--model.max_context_tokens=300000")


def start_in(train: Train, phase: str, *more: str) -> "subprocess.Popen[str]":
    """Start a run and return when it is in the phase."""
    match phase:
        case "loading":
            process = train.start(*more)
            train.until(lambda: any("actors.rollout.main" in line for line in train.pids().values()))
        case "sampling":
            process = train.start(*LONG, *more)
            train.until_doing("sampling")
        case "training":
            train.start_learner(step_s=3)
            process = train.start(*more)
            train.until_doing("training step")
        case "evaluation":
            train.write_reward(SLOW_REWARD)
            process = train.start(*EVALUATED, *more)
            train.until_doing("the rewards of the held-out prompts")
        case _:
            train.start_learner(save_s=3)
            process = train.start("--learner.checkpoint_steps=1", *more)
            train.until_doing("saving the checkpoint")
    return process


def wait_for(train: Train, process: "subprocess.Popen[str]", words: str) -> None:
    """Until the command has shown these words."""
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if words in line:
            return
    raise AssertionError(f"{words!r} was not shown, but:\n{''.join(seen)}\n{train.log()}")


def assert_stopped(train: Train, ended: Any) -> None:
    assert ended.code == 130, (ended, train.log())
    assert ended.err == ""
    assert "Traceback" not in ended.out
    train.assert_nothing_is_left()
    train.rows()


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("loading", signal.SIGINT),
        ("sampling", signal.SIGTERM),
        pytest.param("training", signal.SIGINT, marks=pytest.mark.full),
        pytest.param("evaluation", signal.SIGINT, marks=pytest.mark.full),
        ("saving", signal.SIGTERM),
    ],
)
def test_term_signal_ends_a_run_in_order(train: Train, phase: str, number: signal.Signals) -> None:
    process = start_in(train, phase)
    process.send_signal(number)
    ended = train.finish(process)
    assert_stopped(train, ended)
    assert f"{number.name}: stopping" in ended.out
    if phase == "saving":
        steps = list((train.run_folder / "checkpoints").glob("step-*"))
        assert all((step / "manifest.json").exists() for step in steps)


def test_term_signal_twice_does_not_wait_for_a_process_that_hangs(train: Train) -> None:
    process = start_in(train, "sampling", "--timeouts.stop_s=60")
    os.kill(train.pid_of("actors.reward.main"), signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    wait_for(train, process, "again to stop at once")
    process.send_signal(signal.SIGINT)
    assert_stopped(train, train.finish(process, 40))  # of the 60 s that it was given at first


@pytest.mark.parametrize(
    "phase",
    [
        "loading",
        pytest.param("sampling", marks=pytest.mark.full),
        pytest.param("training", marks=pytest.mark.full),
        pytest.param("evaluation", marks=pytest.mark.full),
        pytest.param("saving", marks=pytest.mark.full),
    ],
)
def test_orphan_engine_nothing_outlives_a_command_that_was_killed(train: Train, phase: str) -> None:
    """K-029."""
    process = start_in(train, phase)
    assert len(train.pids()) >= 4  # the command, its guardian, the hub, its guardian, ...
    process.kill()
    train.finish(process)
    train.assert_nothing_is_left()
    if phase == "saving":
        train.write_reward("def score(prompt, response, data): return float(len(response) % 3)")
        train.start_learner()
        again = train.run("--run.steps=1")
        assert again.code == 0, (again, train.log())


def test_a_hub_that_is_killed_fails_the_run_with_its_reason(train: Train) -> None:
    process = start_in(train, "sampling")
    os.kill(train.pid_of("engine.hub.main"), signal.SIGKILL)
    ended = train.finish(process)
    assert ended.code == 1
    (line,) = ended.err.splitlines()
    assert line.startswith("error: hub ended by signal SIGKILL")
    assert str(train.run_folder / "logs" / "hub.log") in line
    assert (train.run_folder / "logs" / "hub.log").exists()
    train.assert_nothing_is_left()


def test_sample_never_hangs_lost_workers_are_replaced_and_each_group_trained_once(train: Train) -> None:
    """K-053: one that is killed is noticed at once; one that is stopped, when its heartbeats have been missing.

    The limit for silence is one that healthy processes keep on a machine that has far too much to do. The steps after
    the stop take longer than that: a worker that has no group when it is stopped gets none, for it lags behind.
    """
    steps = 12
    options = ("--timeouts.heartbeat_s=5", "--rollout.max_tokens=400", "--reward.num_workers=2")
    process = train.start(f"--run.steps={steps}", "--rollout.num_workers=2", *options)
    # Without a learner nothing is trained yet, so that both workers have a part in the steps that follow.
    train.until_waiting("a newer version", {"rollout-0", "rollout-1"})
    train.start_learner(step_s=0.8)
    wait_for(train, process, "step 3")
    stopped, killed = (pid for pid, line in train.pids().items() if "actors.rollout.main" in line)
    os.kill(stopped, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    ended = train.finish(process)
    assert ended.code == 0, (ended, train.log())
    assert "has not been heard of" in train.log() and "ended by signal SIGKILL" in train.log()
    assert train.log().count("is started anew") >= 2
    assert [row["step"] for row in train.rows()] == list(range(1, steps + 1))
    samples = [msgspec.json.decode(line) for line in (train.run_folder / "samples.jsonl").read_bytes().splitlines()]
    groups = Counter(sample["record_id"].split("/")[0] for sample in samples)
    assert len(groups) == 2 * steps
    assert set(groups.values()) == {2}
    train.assert_nothing_is_left()


# The library within a program that has handlers and a loop of its own.
HOST = """
import asyncio, signal, sys
from pathlib import Path
from headrace.clients.engine import Engine
from headrace.engine.config import load_config

heard = []
handlers = {number: (lambda n, f: heard.append(n)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
for number, handler in handlers.items():
    signal.signal(number, handler)

async def host():
    loop = asyncio.get_running_loop()
    config = load_config(Path("run.toml"), [f"--run.hub={sys.argv[2]}"])
    engine = Engine(config)
    async with engine:
        async for event in engine.events():
            if getattr(event, "values", None):
                break
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        await asyncio.sleep(0)
        await engine.stop()
        await engine.stop()
        result = await engine.wait()
    await engine.stop()
    assert asyncio.get_running_loop() is loop and not loop.is_closed()
    assert await asyncio.to_thread(lambda: 42) == 42
    others = asyncio.all_tasks() - {asyncio.current_task()}
    return result, [task.get_name() for task in others]

factory = None
if sys.argv[1] == "uvloop":
    import uvloop
    factory = uvloop.new_event_loop
with asyncio.Runner(loop_factory=factory) as runner:
    result, others = runner.run(host())
    assert runner.run(asyncio.sleep(0, 7)) == 7
assert all(signal.getsignal(number) is handler for number, handler in handlers.items())
assert {signal.SIGINT, signal.SIGTERM} <= set(heard), heard
print(result.ended, others)
"""


@pytest.mark.parametrize(("loop", "hub"), [("asyncio", "process"), ("uvloop", "inproc")])
def test_term_signal_belongs_to_the_program_that_embeds_the_engine(train: Train, loop: str, hub: str) -> None:
    """K-058 (iii)."""
    (train.folder / "host.py").write_text(HOST)
    train.start_learner(step_s=0.2)
    argv = [sys.executable, "host.py", loop, hub]
    host = subprocess.run(argv, cwd=train.folder, env=train.env, capture_output=True, text=True, timeout=120)
    assert (host.returncode, host.stdout.strip()) == (0, "stopped []"), host.stderr
    train.assert_nothing_is_left()


FAKE_VLLM = 'raise ImportError("built for another machine")'


@pytest.mark.full
def test_a_killed_learner_fails_the_run_with_the_way_on_and_it_resumes(train: Train) -> None:
    from headrace.actors.tiny import build_tiny_model

    build_tiny_model(train.folder / "tiny")
    (train.folder / "vllm.py").write_text(FAKE_VLLM)
    train.env |= {"PYTHONPATH": str(train.folder)}
    train.write_prompts([{"prompt": f"question {n}"} for n in range(64)])
    options = (
        "--model.path=tiny",
        "--model.max_context_tokens=64",
        "--rollout.backend=auto",
        "--learner.launch=engine",
        "--learner.device=cpu",
        "--learner.threads=1",
        "--learner.mixed_precision=no",
        "--learner.checkpoint_steps=1",
        "--learner.keep_checkpoints=1",
        "--run.steps=12",
    )
    process = train.start(*options)
    checkpoints = lambda: list((train.run_folder / "checkpoints").glob("step-*/manifest.json"))  # noqa: E731
    train.until(checkpoints, 90)
    os.kill(train.pid_of("actors.learner.main"), signal.SIGKILL)
    ended = train.finish(process)
    assert ended.code == 1
    (line,) = ended.err.splitlines()
    assert "learner-0 ended by signal SIGKILL" in line
    assert f"headrace train --resume {train.run_folder}" in line
    assert "rollouts use transformers: rollout.backend is auto, and vLLM does not import" in ended.out
    train.assert_nothing_is_left()
    trained = len(train.rows())
    assert 0 < trained < 12
    again = train.run("--resume", str(train.run_folder), "--run.steps=12", *options, limit_s=120)
    assert again.code == 0, (again, train.log())
    assert [row["step"] for row in train.rows()] == list(range(1, 13))
    train.assert_nothing_is_left()
