"""`headrace train` as a user starts it: a process of its own, watched from outside."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from headrace.v1 import control_pb2, control_pb2_grpc

RUN_TOML = """
[run]
name = "run"
folder = "runs"
steps = 3
[model]
path = "scripted"
[data]
source = "jsonl"
path = "prompts.jsonl"
[schedule]
groups_per_step = 2
group_size = 2
[rollout]
backend = "scripted"
max_tokens = 8
max_num_seqs = 8
[learner]
launch = "external"
[reward]
function = "reward_of_test:score"
timeout_s = 5
num_workers = 1
connect_timeout_s = 2
[timeouts]
start_s = 60
stop_s = 3
no_progress_s = 30
"""

REWARD_PY = """
def score(prompt, response, data):
    return float(len(response) % 3)
"""


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


class TrainCommand:
    """`headrace train` in a process of its own, in a folder of its own, with a temporary folder of its own.

    Every process that descends from it carries a mark in its environment, so that none can hide.
    """

    def __init__(self, folder: Path, temp: Path) -> None:
        self.folder, self.temp = folder, temp
        self.mark = uuid.uuid4().hex
        self.env = {**os.environ, "TMPDIR": str(temp), "HEADRACE_TEST_MARK": self.mark, "HF_HUB_OFFLINE": "1"}
        self._beside: list[subprocess.Popen[bytes]] = []
        self.write_prompts([{"prompt": [n + 1, 2, 3], "answer": n} for n in range(64)])
        (folder / "reward_of_test.py").write_text(REWARD_PY)
        (folder / "run.toml").write_text(RUN_TOML)

    def write_prompts(self, rows: list[dict[str, Any]], name: str = "prompts.jsonl") -> None:
        (self.folder / name).write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))

    def write_reward(self, code: str) -> None:
        (self.folder / "reward_of_test.py").write_text(code)

    def start(self, *arguments: str, wrapper: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
        """Start the command; `arguments` follow the name of the configuration."""
        argv = [*wrapper, sys.executable, "-m", "headrace.clients.cli.main", "train", "run.toml", *arguments]
        return subprocess.Popen(
            argv,
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def learner_argv(self, **options: float) -> list[str]:
        """A scripted learner, as a command line."""
        return [sys.executable, str(Path(__file__).with_name("scripted_learner.py")), json.dumps(options)]

    def start_learner(self, **options: float) -> None:
        """A scripted learner beside the command; it ends with the run."""
        argv = self.learner_argv(**options)
        with (self.folder / "learner.log").open("ab") as log:
            self._beside.append(subprocess.Popen(argv, cwd=self.folder, env=self.env, stdout=log, stderr=log))

    def finish(self, process: "subprocess.Popen[str]", limit_s: float = 120.0) -> Ended:
        out, err = process.communicate(timeout=limit_s)
        return Ended(process.returncode, out, err)

    def run(self, *arguments: str, limit_s: float = 120.0) -> Ended:
        return self.finish(self.start(*arguments), limit_s)

    @property
    def run_folder(self) -> Path:
        return (self.folder / "runs" / "latest").resolve()

    def rows(self) -> list[dict[str, Any]]:
        """The metrics; every line must be whole."""
        text = (self.run_folder / "metrics.jsonl").read_bytes()
        assert not text or text.endswith(b"\n")
        return [msgspec.json.decode(line) for line in text.splitlines()]

    def log(self) -> str:
        path = self.run_folder / "log.txt"
        return path.read_text() if path.exists() else ""

    def pids(self) -> dict[int, str]:
        """Every living process that descends from the command, with its command line."""
        found: dict[int, str] = {}
        mark = f"HEADRACE_TEST_MARK={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def pid_of(self, name: str) -> int:
        """The process of a child of the hub, or of the hub itself, by its target."""
        (pid,) = [pid for pid, line in self.pids().items() if f"headrace.{name}" in line]
        return pid

    def until(self, condition: Callable[[], Any], limit_s: float = 90.0) -> Any:
        """Wait for something that other processes do; there is no event to wait for."""
        deadline_s = time.monotonic() + limit_s
        while not (found := condition()):
            left = list(self.temp.rglob("*"))
            assert time.monotonic() < deadline_s, f"not within {limit_s} s: {self.log()}\n{self.pids()}\n{left}"
            time.sleep(0.02)
        return found

    def until_doing(self, words: str, limit_s: float = 90.0) -> None:
        """Until a member says that it does this, or somebody on the board waits for it."""
        (socket,) = self.until(lambda: list(self.temp.glob("headrace-*/hub")))
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            deadline_s = time.monotonic() + limit_s
            while time.monotonic() < deadline_s:
                waits = stub.Why(control_pb2.WhyRequest(), timeout=limit_s, wait_for_ready=True).waits
                if any(words in wait.waits_for for wait in waits):
                    return
                with contextlib.suppress(grpc.RpcError):  # of the short deadline
                    for event in stub.Watch(control_pb2.WatchRequest(), timeout=0.3):
                        if words in event.activity.doing:
                            return
        raise AssertionError(f"nobody did or waited for {words!r} within {limit_s} s; log:\n{self.log()}")

    def until_waiting(self, words: str, members: set[str], limit_s: float = 90.0) -> None:
        """Until each of these members is on the hub's board with this wait."""
        (socket,) = self.until(lambda: list(self.temp.glob("headrace-*/hub")))
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)

            def are_there() -> bool:
                waits = stub.Why(control_pb2.WhyRequest(), timeout=limit_s, wait_for_ready=True).waits
                return members <= {wait.member_id for wait in waits if words in wait.waits_for}

            self.until(are_there, limit_s)

    def assert_nothing_is_left(self, limit_s: float = 15.0) -> None:
        """No process, no socket, no payload: soon, for a guardian works after its supervisor has died."""
        self.until(lambda: not self.pids(), limit_s)
        # torch makes a folder for its compiler's cache there, which stays.
        self.until(lambda: all(path.name.startswith("torchinductor") for path in self.temp.iterdir()), limit_s)
        assert not [path for path in Path("/dev/shm").glob("headrace-weights-*") if is_ownerless(path)]

    def end(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._beside:
            process.wait()
        shutil.rmtree(self.temp, ignore_errors=True)


def is_ownerless(payloads: Path) -> bool:
    """Nobody holds the lock of this folder of weights: its run is dead."""
    with contextlib.suppress(OSError):
        descriptor = os.open(payloads / ".lock", os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(descriptor)
    return False


@pytest.fixture
def train(tmp_path: Path) -> Iterator[TrainCommand]:
    """A command that is ready to start; whatever a test leaves running is killed."""
    # Its own short temporary folder: a socket's path is short.
    command = TrainCommand(tmp_path, Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp")))
    try:
        yield command
    finally:
        command.end()
