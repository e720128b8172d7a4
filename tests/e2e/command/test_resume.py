"""K-028: a run that was killed and resumed trains each prompt of its epoch exactly once."""

import os
import signal
from collections import Counter
from typing import Any

import msgspec
import pytest

pytestmark = pytest.mark.timeout(300)

Train = Any  # the fixture of conftest.py

STEPS, GROUPS_PER_STEP = 12, 2
OPTIONS = (
    f"--run.steps={STEPS}",
    "--data.epochs=1",
    "--learner.checkpoint_steps=2",
    "--schedule.max_staleness=2",
    "--rollout.max_tokens=60",
)


# Held-out prompts take long to score while there is a file "slow".
REWARD = """
import time
from pathlib import Path
def score(prompt, response, data):
    while data["answer"] < 0 and Path(__file__).with_name("slow").exists():
        time.sleep(0.05)
    return float(len(response) % 3)
"""


@pytest.mark.full
def test_an_evaluation_that_a_crash_interrupted_is_made_after_the_resumption(train: Train) -> None:
    train.write_reward(REWARD)
    train.write_prompts([{"prompt": [n + 1, 2, 3], "answer": -1} for n in range(4)], "held_out.jsonl")
    options = ("--run.steps=4", "--eval.num_prompts=4", "--eval.path=held_out.jsonl", "--eval.every_steps=2")
    options = (*options, "--learner.checkpoint_steps=2", "--reward.timeout_s=60")
    process = train.start(*options)
    train.until(lambda: "evaluated 4 prompts after step 0" in train.log())
    (train.folder / "slow").touch()
    train.start_learner(step_s=2.0)  # the next checkpoint, which would lie behind the evaluation, is two steps away
    train.until(lambda: list((train.folder / "runs").glob("*/checkpoints/step-00000002/manifest.json")))
    train.until_waiting("the rewards of the held-out prompts", {"evaluation"})
    os.kill(process.pid, signal.SIGKILL)
    train.finish(process)
    train.until(lambda: not train.pids())
    assert [row["step"] for row in train.rows() if "eval/accuracy" in row] == [0]
    (train.folder / "slow").unlink()
    train.start_learner()
    ended = train.run("--resume", str(train.run_folder), *options)
    assert ended.code == 0, (ended, train.log())
    assert [row["step"] for row in train.rows() if "eval/accuracy" in row] == [0, 2, 4]


def trained(train: Train) -> Counter[str]:
    """How many samples of each prompt were trained on, by the prompt's only number."""
    lines = (train.run_folder / "samples.jsonl").read_bytes().splitlines()
    return Counter(msgspec.json.decode(line)["prompt"] for line in lines)


@pytest.mark.parametrize(
    "workers",
    [(1, 2), pytest.param((2, 1), marks=pytest.mark.full)],
    ids=["then two workers", "then one worker"],
)
def test_resume_prompts_each_prompt_of_an_epoch_is_trained_on_once(train: Train, workers: tuple[int, int]) -> None:
    train.write_prompts([{"prompt": [n + 1, 2, 3], "answer": n} for n in range(STEPS * GROUPS_PER_STEP)])
    train.start_learner(step_s=1.0)  # slow, so that the kill falls into the middle
    process = train.start(f"--rollout.num_workers={workers[0]}", *OPTIONS)
    train.until(lambda: list((train.folder / "runs").glob("*/checkpoints/step-00000002/manifest.json")))
    # In the middle of a step that no checkpoint covers, with groups in flight and in the buffer.
    train.until_doing("training step")
    os.kill(process.pid, signal.SIGKILL)
    train.finish(process)
    train.until(lambda: not train.pids())
    checkpoint = max((train.run_folder / "checkpoints").glob("step-*"))
    prompts = msgspec.json.decode((checkpoint / "hub.json").read_bytes())["prompts"]
    assert len(prompts["unfinished"]) >= GROUPS_PER_STEP, "nothing was handed out when the checkpoint was written"
    before = trained(train)
    assert 0 < len(before) < STEPS * GROUPS_PER_STEP
    train.start_learner()
    ended = train.run("--resume", str(train.run_folder), f"--rollout.num_workers={workers[1]}", *OPTIONS)
    assert ended.code == 0, (ended, train.log())
    assert [row["step"] for row in train.rows()] == list(range(1, STEPS + 1))
    after = trained(train)
    assert len(after) == STEPS * GROUPS_PER_STEP, "a prompt was lost"
    assert set(after.values()) == {2}, "a prompt was trained on twice"
    assert before.keys() < after.keys()
