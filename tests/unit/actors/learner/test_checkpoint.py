import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.actors.learner.checkpoint import CheckpointStore, find_latest, is_complete, to_remove


class FileTrainer:
    """Saves a few files; the rest of a trainer is not needed to save."""

    def __init__(self, size: int = 1000) -> None:
        self.size = size

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for name in ("a.bin", "b.bin"):
            (folder / name).write_bytes(os.urandom(self.size))


# Saves steps for ever, telling each step that is complete; ended by a signal at some moment of it.
_SAVER = """
import sys
from pathlib import Path
from headrace.actors.learner.checkpoint import CheckpointStore, find_latest

class FileTrainer:
    def save(self, folder):
        for index in range(8):
            (folder / f"{index}.bin").write_bytes(bytes(200_000))

folder = Path(sys.argv[1])
store = CheckpointStore(folder, keep=1, rank=0)
latest = find_latest(folder)
step = int(latest.name.removeprefix("step-")) if latest else 0
while True:
    step += 1
    store.save(FileTrainer(), step, {"hub.json": b"{}"})
    print(step, flush=True)
"""


def save(store: CheckpointStore, step: int) -> Path:
    return store.save(FileTrainer(), step, {"hub.json": b"{}"})  # type: ignore[arg-type]


def test_the_newest_complete_checkpoint_is_found_and_partial_ones_are_passed_over(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "nowhere") is None
    store = CheckpointStore(tmp_path, keep=3, rank=0)
    first, second, third = (save(store, step) for step in (1, 2, 10))
    assert find_latest(tmp_path) == third
    (third / "b.bin").write_bytes(b"cut short")
    assert find_latest(tmp_path) == second
    (second / "manifest.json").unlink()
    (tmp_path / "step-00000099").mkdir()
    (tmp_path / "step-notes.txt").touch()
    assert find_latest(tmp_path) == first and is_complete(first)


def test_retention_keeps_the_newest_complete_ones_and_removes_leftovers(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2, rank=0)
    (tmp_path / ".partial-step-00000001").mkdir()
    for step in range(1, 5):
        save(store, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_retention_counts_complete_checkpoints_only() -> None:
    assert to_remove({1: True, 2: False, 3: False}, keep=1) == []
    assert to_remove({1: True, 2: True, 3: False}, keep=1) == [1]
    assert to_remove({1: False, 2: True, 3: True}, keep=2) == [1]
    assert to_remove({1: False}, keep=1) == []
    assert to_remove({}, keep=1) == []


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2, rank=0)
    before = (save(store, 1) / "a.bin").read_bytes()
    assert (save(store, 1) / "a.bin").read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_other_ranks_write_their_part_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".partial-step-00000001").mkdir()
    CheckpointStore(tmp_path, keep=1, rank=1).save(FileTrainer(), 1)  # type: ignore[arg-type]
    assert find_latest(tmp_path) is None
    assert sorted(path.name for path in (tmp_path / ".partial-step-00000001").iterdir()) == ["a.bin", "b.bin"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_kills", [20, pytest.param(50, marks=pytest.mark.full)])
def test_atomic_checkpoint_a_kill_at_any_moment_costs_at_most_the_one_being_saved(
    tmp_path: Path, num_kills: int
) -> None:
    """K-022; each process finds and removes what the one before it left."""
    rng = random.Random(num_kills)
    reported = leftovers = 0
    for _ in range(num_kills):
        saver = subprocess.Popen([sys.executable, "-c", _SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert saver.stdout is not None
        reported = int(saver.stdout.readline())  # at least one more is complete
        try:
            # A random moment of the saves that follow.
            saver.wait(timeout=rng.uniform(0.0, 0.02))
        except subprocess.TimeoutExpired:
            saver.send_signal(signal.SIGKILL)
        rest = saver.communicate()[0].split()
        reported = int(rest[-1]) if rest else reported
        latest = find_latest(tmp_path)
        assert latest is not None and is_complete(latest)
        assert int(latest.name.removeprefix("step-")) >= reported
        assert (latest / "hub.json").read_bytes() == b"{}"
        leftovers += any(path.name.startswith(".partial-") for path in tmp_path.iterdir())
    assert leftovers > num_kills / 4, "the kills did not fall into saves"
    save(CheckpointStore(tmp_path, keep=1, rank=0), 10**6)
    assert [path.name for path in tmp_path.iterdir()] == ["step-01000000"]
