"""Children: their death and ours. Real processes, real SIGKILL."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from headrace.engine.errors import ActorLostError, ConfigError
from headrace.engine.supervision.child import Child
from headrace.engine.supervision.guardian import Guardian

# What children run: importable there through PYTHONPATH.
PROGRAM = '''
import os, subprocess, sys, time, threading, signal
from headrace.engine.errors import ConfigError

def fail(message):
    raise ConfigError(message)

def crash():
    os.kill(os.getpid(), signal.SIGKILL)

def family(note):
    """A child with a grandchild that ignores SIGTERM, like an inference engine's core."""
    grandchild = subprocess.Popen([sys.executable, "-c", "import signal,time; signal.signal(15, 1); time.sleep(600)"])
    with open(note, "w") as f:
        f.write(f"{os.getpid()} {grandchild.pid}")
    os.rename(note, note + ".done")
    time.sleep(600)

def stuck(note):
    """Deaf to everything while it loads, with its only Python thread busy."""
    open(note, "w").close()
    os.rename(note, note + ".done")
    while True:
        sum(range(1000))
'''

PARENT = """
import asyncio, sys
from pathlib import Path
from headrace.engine.supervision.child import Child
from headrace.engine.supervision.guardian import Guardian

async def main():
    folder = Path(sys.argv[1])
    child = Child.spawn(
        "family", "family_program:family", {"note": str(folder / "note")},
        guardian=Guardian(), log_folder=folder, env={"PYTHONPATH": str(folder)},
    )
    await child.wait()

asyncio.run(main())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "family_program.py").write_text(PROGRAM)
    return tmp_path


@pytest.fixture
async def spawn(folder: Path) -> AsyncIterator[Callable[..., Child]]:
    guardian = Guardian()

    def start(function: str, **arguments: str) -> Child:
        return Child.spawn(
            function,
            f"family_program:{function}",
            arguments,
            guardian=guardian,
            log_folder=folder,
            env={"PYTHONPATH": str(folder)},
        )

    yield start
    guardian.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def marked(mark: str) -> list[int]:
    """The living processes whose environment has this mark."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


async def until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Wait for something that another process does; there is no event to wait for."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


async def test_a_childs_typed_error_comes_back_as_itself(spawn: Callable[..., Child]) -> None:
    child = spawn("fail", message="model.path is empty; name a model")
    assert await asyncio.wait_for(child.wait(), 60) == 2
    error = child.why_it_ended()
    assert type(error) is ConfigError
    assert str(error) == "model.path is empty; name a model"


async def test_a_killed_child_is_reported_with_its_signal(spawn: Callable[..., Child]) -> None:
    child = spawn("crash")
    await asyncio.wait_for(child.wait(), 60)
    error = child.why_it_ended()
    assert isinstance(error, ActorLostError)
    assert "SIGKILL" in str(error)


async def test_stopping_a_child_ends_its_whole_group(spawn: Callable[..., Child], folder: Path) -> None:
    child = spawn("family", note=str(folder / "note"))
    await until((folder / "note.done").exists)
    pids = [int(word) for word in (folder / "note.done").read_text().split()]
    await child.stop(grace_s=5)
    await until(lambda: not any(alive(pid) for pid in pids))
    await child.stop(grace_s=5)  # twice is harmless


async def test_a_killed_child_takes_its_own_children_with_it(spawn: Callable[..., Child], folder: Path) -> None:
    child = spawn("family", note=str(folder / "note"))
    await until((folder / "note.done").exists)
    pids = [int(word) for word in (folder / "note.done").read_text().split()]
    os.kill(pids[0], signal.SIGKILL)
    await child.wait()
    await until(lambda: not alive(pids[1]))


@pytest.mark.parametrize("moment", ["at once", "when the family is complete"])
async def test_orphan_engine(folder: Path, moment: str) -> None:
    """K-029: a SIGKILL of the parent leaves nobody, neither while loading nor later."""
    script = folder / "parent.py"
    script.write_text(PARENT)
    mark = uuid.uuid4().hex  # all that descend from the parent have it in their environment
    env = {**os.environ, "PYTHONPATH": "", "HEADRACE_TEST_MARK": mark}
    parent = subprocess.Popen([sys.executable, str(script), str(folder)], env=env)
    try:
        if moment == "at once":
            await until((folder / "family.log").exists)
        else:
            await until((folder / "note.done").exists)
    finally:
        parent.kill()
        parent.wait()
    await until(lambda: not marked(mark))
    if (folder / "note.done").exists():
        pids = [int(word) for word in (folder / "note.done").read_text().split()]
        await until(lambda: not any(alive(pid) for pid in pids))


async def test_a_busy_child_dies_with_its_parent_too(folder: Path) -> None:
    script = folder / "parent.py"
    script.write_text(PARENT.replace("family_program:family", "family_program:stuck"))
    parent = subprocess.Popen([sys.executable, str(script), str(folder)])
    children: list[int] = []
    try:
        await until((folder / "note.done").exists)
        listing = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text()
        children = [int(word) for word in listing.split()]
        assert len(children) == 2  # the guardian and the child
    finally:
        parent.kill()
        parent.wait()
    await until(lambda: not any(alive(pid) for pid in children))


async def test_killing_the_guardian_does_not_harm_the_run(folder: Path) -> None:
    guardian = Guardian()
    os.kill(guardian.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, guardian.pid, os.WEXITED | os.WNOWAIT)
    child = Child.spawn(
        "fail",
        "family_program:fail",
        {"message": "x"},
        guardian=guardian,
        log_folder=folder,
        env={"PYTHONPATH": str(folder)},
    )
    assert await asyncio.wait_for(child.wait(), 60) == 2
    guardian.close()


async def test_a_killed_supervisors_folders_are_removed_by_its_guardian(folder: Path) -> None:
    doomed = folder / "doomed"
    doomed.mkdir()
    (doomed / "socket").touch()
    program = (
        "import sys, time; from pathlib import Path; from headrace.engine.supervision.guardian import Guardian\n"
        "Guardian().remove(Path(sys.argv[1])); print('ready', flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(doomed)], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()
    await until(lambda: not doomed.exists())
    assert folder.exists()
