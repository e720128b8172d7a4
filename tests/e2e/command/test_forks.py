"""K-057: the engine spawns its processes, and a host that forks beside it does not disturb it."""

import subprocess
import sys
from typing import Any

import pytest

from headrace.engine.supervision import child

pytestmark = pytest.mark.timeout(300)

Train = Any  # the fixture of conftest.py

# While the engine's stream is open the host forks a child, as a data loader does, and spawns one that calls the hub.
HOST = """
import asyncio, os, signal, sys
from pathlib import Path
from headrace.clients.engine import Engine
from headrace.engine.config import load_config
from headrace.engine.telemetry.events import MetricsRow

CALL = '''
import sys, grpc
from headrace.v1 import control_pb2, control_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = control_pb2_grpc.ControlServiceStub(channel)
    print(stub.GetStatus(control_pb2.GetStatusRequest(), timeout=30).num_steps)
'''

def forked():
    pid = os.fork()
    if not pid:
        os._exit(sum(number * number for number in range(5)))  # without a call of gRPC
    return pid

async def host():
    forks, steps = [], []
    async with Engine(load_config(Path("run.toml"), ["--run.steps=12"])) as engine:
        async for event in engine.events():
            if not isinstance(event, MetricsRow):
                continue
            steps.append(event.step)
            if event.step in (2, 3, 4):
                forks.append(forked())
            if event.step == 5:
                spawned = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", CALL, engine.hub_address, stdout=asyncio.subprocess.PIPE
                )
        answer = (await spawned.communicate())[0].decode().strip()
        result = await engine.wait()
    for pid in forks:
        os.kill(pid, signal.SIGKILL)  # what became of a forked child is nobody's promise: it may have crashed or hang
        os.waitpid(pid, 0)
    # The row of the last step may come after the end, for this learner is not the engine's own.
    print(result.ended, len(forks), answer, steps[:11] == list(range(1, 12)))

asyncio.run(host())
"""


def test_fork_after_grpc_a_forked_child_of_the_host_does_not_disturb_the_engine(train: Train) -> None:
    (train.folder / "host.py").write_text(HOST)
    train.start_learner(step_s=0.1)
    # No warning is an error here: the newer Pythons warn of every fork of a program with threads.
    argv = [sys.executable, "host.py"]
    host = subprocess.run(argv, cwd=train.folder, env=train.env, capture_output=True, text=True, timeout=120)
    assert (host.returncode, host.stdout.strip()) == (0, "finished 3 12 True"), host.stderr
    train.assert_nothing_is_left()


def test_fork_after_grpc_every_process_of_a_run_is_a_program_of_its_own(train: Train) -> None:
    """A forked process would show the command line of its parent."""
    process = train.start("--rollout.num_workers=2", "--rollout.max_tokens=200000", "--model.max_context_tokens=300000")
    train.until_doing("sampling")
    lines = [line for line in train.pids().values() if sys.executable in line]
    own = [line for line in lines if "-I -S -c" not in line]  # a guardian is the same program each time
    assert len(own) >= 5 and len(set(own)) == len(own)
    assert "spawned, never forked" in (child.Child.__doc__ or "")
    process.kill()
    train.finish(process)
    train.assert_nothing_is_left()
