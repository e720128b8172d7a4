"""The command's own processes: a reward server as a child, and signals from a terminal."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.clients.cli.reward_child import RewardChild
from headrace.engine.errors import UsageError

REWARD = """
print("a module that talks")

def score(prompt, response, data):
    return 1.0
"""

# The command with an engine that prints what it was given, waits, and takes for ever to stop unless it must at once.
COMMAND = """
import argparse, asyncio, sys
from pathlib import Path
from headrace.clients.cli.train import add_arguments, run
from headrace.engine.telemetry import LogLine, RunResult

class Engine:
    def __init__(self, config, *, resume=None):
        self.run_folder = Path.cwd()
        self.address = config.reward.address
        self.ended = asyncio.Event()
    async def __aenter__(self): return self
    async def __aexit__(self, *_): pass
    async def events(self):
        yield LogLine(text=f"address {self.address}")
        await asyncio.Event().wait()
    async def wait(self):
        await self.ended.wait()
        return RunResult(steps=0, ended="stopped")
    async def stop(self, grace_s):
        if grace_s > 0:
            await self.ended.wait()
        self.ended.set()

parser = argparse.ArgumentParser()
add_arguments(parser)
args = parser.parse_args()
args.overrides = ["--model.path=tiny", "--data.path=prompts.jsonl"]
sys.exit(run(args, Engine))
"""


def start_command(folder: Path) -> subprocess.Popen[str]:
    (folder / "rewards_of_test.py").write_text(REWARD)
    (folder / "command.py").write_text(COMMAND)
    (folder / "run.toml").write_text("")
    argv = [sys.executable, "command.py", "run.toml", "--reward-server", "rewards_of_test:score"]
    return subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if words in line:
            return line
    raise AssertionError(f"{words!r} was not printed, but:\n{''.join(seen)}")


@pytest.mark.timeout(120)
def test_term_signal_twice_ends_the_command_and_its_reward_server(tmp_path: Path) -> None:
    process = start_command(tmp_path)
    try:
        address = read_until(process, "address grpc://").split("grpc://")[1].strip()
        process.send_signal(signal.SIGINT)
        read_until(process, "SIGINT: stopping; running work has 10 s to end; press Ctrl-C again")
        process.send_signal(signal.SIGTERM)
        read_until(process, "SIGTERM: stopping at once")
        rest = process.stdout.read() if process.stdout is not None else ""
        assert process.wait(60) == 130
        assert "Traceback" not in rest
        assert not answers(address)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.timeout(120)
def test_orphan_reward_server_is_not_left_when_the_command_is_killed(tmp_path: Path) -> None:
    process = start_command(tmp_path)
    assert process.stdout is not None
    with process.stdout:
        host, _, port = read_until(process, "address grpc://").split("grpc://")[1].strip().rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            process.kill()
            process.wait()
            while connection.recv(4096):  # the server's end of the connection closes with the server
                pass
    assert not answers(f"{host}:{port}")


@pytest.mark.timeout(120)
async def test_a_reward_that_cannot_be_used_is_refused_with_what_the_server_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no_such_module_here:score did not start: .*no_such_module"):
        await RewardChild.start("no_such_module_here:score", timeout_s=60, on_line=lambda line: None)


@pytest.mark.timeout(120)
async def test_a_reward_server_that_dies_says_so() -> None:
    said: asyncio.Queue[str] = asyncio.Queue()
    child = await RewardChild.start("math:sqrt", timeout_s=60, on_line=said.put_nowait)
    os.kill(child._process.pid, signal.SIGKILL)  # pyright: ignore[reportPrivateUsage]
    line = ""
    while "has ended with exit code -9" not in line:
        line = await said.get()
    await child.end()
    await child.end()


def answers(address: str) -> bool:
    """Whether somebody accepts connections there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True
