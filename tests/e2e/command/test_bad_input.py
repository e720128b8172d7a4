"""What a user gets wrong, told in one sentence: which setting, what to do; and nothing is left behind."""

import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytestmark = pytest.mark.timeout(300)

Train = Any  # the fixture of conftest.py

USAGE, RUN = 2, 1


def check(train: Train, ended: Any, code: int, *words: str) -> str:
    """One clear sentence on standard error, this exit code, and nothing left."""
    assert ended.code == code, (ended, train.log())
    lines = ended.err.splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0], lines[0]
    assert "Traceback" not in ended.out
    train.assert_nothing_is_left()
    return lines[0]


def check_nothing_was_started(train: Train, ended: Any, *words: str) -> None:
    check(train, ended, USAGE, *words)
    assert not (train.folder / "runs").exists()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no/such/model", ("model.path = 'no/such/model'", "give a local folder", "HF_HUB_OFFLINE")),
        pytest.param(
            "./no_such_model",
            ("model.path = './no_such_model' does not exist", "name an existing folder"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            "package://no_such_package/a.gguf",
            ("package 'no_such_package' is not installed", "install it"),
            marks=pytest.mark.full,
        ),
        ("nobody/model-of-the-hub", ("neither a folder nor a model of the hub", "connect and unset HF_HUB_OFFLINE")),
    ],
)
def test_a_missing_model_is_refused_before_anything_starts(train: Train, path: str, words: tuple[str, ...]) -> None:
    ended = train.run(f"--model.path={path}", "--rollout.backend=auto", "--learner.launch=engine")
    check_nothing_was_started(train, ended, *words)


def test_broken_toml_is_refused_with_its_line(train: Train) -> None:
    (train.folder / "run.toml").write_text("[run]\nsteps = = 3\n")
    check_nothing_was_started(train, train.run(), "run.toml is not TOML", "line 2")


def test_an_unknown_key_is_refused_with_the_nearest_name(train: Train) -> None:
    ended = train.run("--schedule.group_sise=4")
    check_nothing_was_started(train, ended, "schedule.group_sise", "did you mean schedule.group_size")


def test_a_group_of_one_with_grpo_is_refused(train: Train) -> None:
    ended = train.run("--schedule.group_size=1", "--buffer.capacity_records=100")
    check_nothing_was_started(train, ended, "schedule.group_size = 1", "at least 2")


def test_a_missing_held_out_file_is_refused(train: Train) -> None:
    ended = train.run("--eval.num_prompts=4", "--eval.path=held_out.jsonl")
    check_nothing_was_started(train, ended, "eval.path = 'held_out.jsonl'", "cannot be read", "correct the path")


def test_more_steps_than_prompts_are_refused(train: Train) -> None:
    ended = train.run("--data.epochs=1", "--run.steps=33")
    check_nothing_was_started(train, ended, "needs 66 prompts", "data.epochs = 1 gives 64", "run.steps to at most 32")


def test_a_reward_module_that_does_not_exist_is_refused(train: Train) -> None:
    ended = train.run("--reward.function=no_such_module_here:score")
    check_nothing_was_started(train, ended, "reward.function", "no module 'no_such_module_here'")


def test_a_run_folder_that_cannot_be_made_is_told(train: Train) -> None:
    (train.folder / "taken").write_text("a file")
    ended = train.run("--run.folder=taken/runs")
    check(train, ended, RUN, "taken/runs cannot be written", "set run.folder to another place")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        pytest.param(
            "import no_such_thing\ndef score(prompt, response, data): return 1.0",
            ("no_such_thing",),
            marks=pytest.mark.full,
            id="import fails",
        ),
        pytest.param(
            "def other(sample): return 1.0",
            ("reward_of_test", "no score"),
            marks=pytest.mark.full,
            id="no such function",
        ),
        pytest.param("def score(a, b, c, d): return 1.0", ("takes (a, b, c, d)", "allowed is"), id="wrong signature"),
    ],
)
def test_a_reward_that_cannot_be_loaded_ends_the_run(train: Train, code: str, words: tuple[str, ...]) -> None:
    train.write_reward(code)
    check(train, train.run(), RUN, "reward.function", *words)
    assert train.rows() == []


BATCH = "from headrace.clients.reward import batched\n@batched\ndef score(samples): return [1.0]"


BAD_REWARDS = {
    "raises": "def score(prompt, response, data): raise KeyError('answer')",
    "nan": "def score(prompt, response, data): return float('nan')",
    "text": "def score(prompt, response, data): return '0.5'",
    "wrong length": BATCH,
}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (BAD_REWARDS["raises"], ("KeyError: 'answer'", "reward_of_test.py line 1")),
        pytest.param(BAD_REWARDS["nan"], ("returned nan", "must be finite"), marks=pytest.mark.full),
        pytest.param(
            BAD_REWARDS["text"], ("returned '0.5' (str)", "allowed is a finite number"), marks=pytest.mark.full
        ),
        (BAD_REWARDS["wrong length"], ("1", "2 samples", "one a sample")),
    ],
    ids=list(BAD_REWARDS),
)
def test_a_reward_that_gives_no_values_ends_the_run(train: Train, code: str, words: tuple[str, ...]) -> None:
    train.write_reward(code)
    check(train, train.run("--reward.on_failure=fail"), RUN, *words, "mend the scorer", "reward.on_failure")
    assert train.rows() == []


def test_a_reward_that_never_gives_a_value_ends_the_run_although_each_failure_is_absorbed(train: Train) -> None:
    train.write_reward(BAD_REWARDS["raises"])
    ended = train.run("--rollout.request_retries=1")
    check(train, ended, RUN, "8 groups in a row got no reward", "KeyError: 'answer'", "mend the scorer")
    assert "failed (2 failures so far)" in train.log()
    assert train.rows() == []


def test_a_reward_server_that_is_not_there_is_told_within_its_time(train: Train) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    ended = train.run("--reward.function=", f"--reward.address=grpc://127.0.0.1:{port}")
    check(train, ended, RUN, f"127.0.0.1:{port}", "within 2 s", "start it or correct the address")


SERVER = """
import asyncio, sys
import grpc
from headrace.v1 import reward_pb2, reward_pb2_grpc

class Short(reward_pb2_grpc.RewardServiceServicer):
    async def Score(self, request, context):
        return reward_pb2.ScoreResponse(outcomes=[reward_pb2.RewardOutcome(sample_id="x", outcome=1, value=1.0)])

async def main():
    server = grpc.aio.server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(Short(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


def test_a_reward_server_with_the_wrong_number_of_outcomes_ends_the_run(train: Train) -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        ended = train.run("--reward.function=", f"--reward.address=grpc://127.0.0.1:{port}", "--reward.on_failure=fail")
        check(train, ended, RUN, "answered 1 outcomes for 2 samples", "give one a sample")
    finally:
        server.kill()
        server.communicate()


def test_a_prompt_longer_than_the_context_ends_the_run_by_name(train: Train) -> None:
    train.write_prompts([{"prompt": list(range(100))}])
    ended = train.run("--model.max_context_tokens=64")
    check(train, ended, RUN, "has 100 tokens", "model.max_context_tokens = 64", 'set rollout.overlong_prompt = "drop"')


def test_prompts_longer_than_the_context_are_dropped_where_that_is_asked_for(train: Train) -> None:
    train.write_prompts([{"prompt": list(range(100 if n % 2 else 10))} for n in range(64)])
    train.start_learner()
    ended = train.run("--model.max_context_tokens=64", "--rollout.overlong_prompt=drop")
    assert ended.code == 0, (ended, train.log())
    rows = train.rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert sum(row.get("groups/dropped_prompt_too_long", 0) for row in rows) > 0
    assert "has 100 tokens" in train.log()
    train.assert_nothing_is_left()


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of one MiB that has 200 KiB left."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small disk needs more rights: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("free_kib", [0, 100])
def test_a_full_disk_ends_the_run_with_whole_files(train: Train, small_disk: Path, free_kib: int) -> None:
    (small_disk / "ballast").write_bytes(bytes((1024 - free_kib) << 10)) if free_kib else fill(small_disk)
    if free_kib:
        train.start_learner()
    ended = train.run(f"--run.folder={small_disk}/runs", "--run.steps=2000", "--schedule.groups_per_step=4")
    check(train, ended, RUN, "full", "free some space there or set run.folder to another disk")
    for file in small_disk.glob("runs/run-*/*.jsonl"):
        content = file.read_bytes()
        assert not content or content.endswith(b"\n"), file
        for row in content.splitlines():
            msgspec.json.decode(row)
    assert free_kib or not list(small_disk.glob("runs/run-*"))
    assert not list(small_disk.glob("runs/*/checkpoints/step-*"))


def fill(place: Path) -> None:
    with pytest.raises(OSError), (place / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_shared_memory_that_is_too_small_for_the_weights_is_gone_around(train: Train) -> None:
    mount = "mount -t tmpfs -o size=256k tmpfs /dev/shm"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("a private mount of /dev/shm needs more rights")
    learner = shlex.join(train.learner_argv(num_weights=200_000))
    script = f'{mount} && {{ {learner} >learner.log 2>&1 & exec "$@"; }}'
    wrapper = ("unshare", "--mount", "sh", "-c", script, "sh")
    ended = train.finish(train.start(wrapper=wrapper))
    assert ended.code == 0, (ended, train.log())
    (line,) = [line for line in train.log().splitlines() if "which is slower" in line]
    assert "weights go to" in line and "there is no room" in line
    train.assert_nothing_is_left()
