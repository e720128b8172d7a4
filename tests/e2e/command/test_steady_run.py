"""K-062, the short form: nothing of the hub grows with the number of steps, failures included."""

import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

Train = Any  # the fixture of conftest.py

# Steps, warm-up, and how many bytes a step may add. Bounded histories (the newest spans, for one) still fill during the
# short run, so its limit only sounds the alarm; the case's own limit of 1 KiB is that of the long one.
SHORT, LONG = (300, 100, 8192), (900, 450, 1024)

# One sample in forty gets no reward, so that about one group in twenty begins anew.
REWARD = """
import zlib
def score(prompt, response, data):
    number = zlib.crc32(response.encode())
    if number % 40 == 0:
        raise ValueError("a scorer that fails now and then")
    return float(number % 3)
"""

# The hub on this loop, so that its tasks can be counted; the actors in processes of their own.
PROGRAM = """
import asyncio, gc, json, os, sys
from pathlib import Path
from headrace.clients.engine import Engine
from headrace.engine.config import load_config
from headrace.engine.telemetry.events import MetricsRow

def measure(step):
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return [step, pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())]

async def main():
    config = load_config(Path("run.toml"), ["--run.hub=inproc", *sys.argv[1:]])
    async with Engine(config) as engine:
        async for event in engine.events():
            if isinstance(event, MetricsRow) and event.step % 10 == 0:
                print(json.dumps(measure(event.step)), flush=True)
        result = await engine.wait()
        print(json.dumps([result.ended, result.error]))

asyncio.run(main())
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("num_steps", "warm_up", "limit_bytes"), [SHORT, pytest.param(*LONG, marks=pytest.mark.full)], ids=["short", "long"]
)
def test_steady_memory_files_and_tasks_of_a_run_with_failures(
    train: Train, record_property: Any, num_steps: int, warm_up: int, limit_bytes: int
) -> None:
    train.write_reward(REWARD)
    (train.folder / "steady.py").write_text(PROGRAM)
    train.start_learner()
    argv = [
        sys.executable,
        "steady.py",
        f"--run.steps={num_steps}",
        "--rollout.max_tokens=64",
        "--timeouts.no_progress_s=60",
    ]
    done = subprocess.run(argv, cwd=train.folder, env=train.env, capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stderr[-2000:]
    *measured, end = [msgspec.json.decode(line) for line in done.stdout.splitlines()]
    assert end == ["finished", None]
    assert "failures so far" in train.log()
    steps, memory, files, tasks = np.array([row for row in measured if row[0] >= warm_up], float).T
    slopes = [float(np.polyfit(steps, counts, 1)[0]) for counts in (memory, files, tasks)]
    record_property("bytes_per_step", slopes[0])
    print(f"bytes, files, tasks per step: {slopes}; at the end {memory[-1]:.0f}, {files[-1]:.0f}, {tasks[-1]:.0f}")
    assert slopes[0] < limit_bytes
    assert abs(slopes[1]) < 0.02 and abs(slopes[2]) < 0.02
    train.assert_nothing_is_left()
