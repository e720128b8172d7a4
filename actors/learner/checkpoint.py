"""Checkpoints of a run: one folder a step, complete or not there (no torch).

Invariants:
- A step is written in a hidden scratch folder, its manifest last, and appears by one rename. Whatever a crash leaves
  behind is a scratch folder, which never counts and is removed by the next save.
- Retention runs after the new checkpoint is complete and counts complete ones only: the last is never removed.
"""

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from headrace.engine.errors import StorageError
from headrace.engine.interfaces import TrainerBackend

MANIFEST_FILE = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})")
_SCRATCH = ".partial-"


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds: the step that it covers up to, and each file's size in bytes."""

    step: int
    files: dict[str, int]


def find_latest(folder: Path) -> Path | None:
    """The newest complete checkpoint below `folder`, or None. Partial ones are passed over; nothing is changed."""
    for _, path in sorted(_steps(folder), reverse=True):
        if is_complete(path):
            return path
    return None


def is_complete(checkpoint: Path) -> bool:
    """Whether the manifest is there and each file that it names has its size."""
    try:
        manifest = msgspec.json.decode((checkpoint / MANIFEST_FILE).read_bytes(), type=CheckpointManifest)
        return all((checkpoint / name).stat().st_size == size for name, size in manifest.files.items())
    except (OSError, msgspec.DecodeError):
        return False


def to_remove(steps: Mapping[int, bool], keep: int) -> list[int]:
    """Which steps retention removes: all but the `keep` newest complete ones; pure.

    Args:
        steps: Each step that is there, and whether it is complete.
        keep: How many complete ones stay, at least 1.

    Returns:
        Steps to remove, oldest first. Incomplete steps newer than every kept one are left alone: they may still be
        written by somebody else.
    """
    assert keep >= 1
    kept = sorted((step for step, complete in steps.items() if complete), reverse=True)[:keep]
    if not kept:
        return []
    return sorted(step for step in steps if step not in kept and step < max(kept))


class CheckpointStore:
    """Saves a run's checkpoints below one folder. Each rank has its own object; all call `save` in step.

    Args:
        folder: Holds `step-<number>` folders; created at the first save.
        keep: How many complete checkpoints stay.
        rank: Rank 0 writes manifests, renames and removes.
    """

    def __init__(self, folder: Path, *, keep: int, rank: int) -> None:
        self._folder = folder
        self._keep = keep
        self._rank = rank

    def save(self, trainer: TrainerBackend, step: int, extra: Mapping[str, bytes] | None = None) -> Path:
        """Save the trainer and further files as the checkpoint of `step`; blocks until it is on disk.

        A checkpoint of the same step that is complete already is replaced.

        Args:
            trainer: Its `save` is collective.
            step: Steps consumed by the weights.
            extra: Further files by name; those of rank 0 count.

        Returns:
            The checkpoint's folder. On other ranks than 0 it may not be complete yet.

        Raises:
            StorageError: The disk is full or not writable; earlier checkpoints are untouched.
        """
        name = f"step-{step:08d}"
        scratch, target = self._folder / f"{_SCRATCH}{name}", self._folder / name
        try:
            if self._rank == 0:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._clear_scratch()
                scratch.mkdir()
            trainer.save(scratch)  # the others wait in it until rank 0 has come here
            if self._rank == 0:
                for file_name, content in (extra or {}).items():
                    write_durably(scratch / file_name, content)
                self._complete(scratch, target, step)
        except OSError as error:
            raise StorageError(
                f"the checkpoint of step {step} cannot be written to {self._folder} ({error.strerror or error}): "
                "free space there; earlier checkpoints are untouched"
            ) from error
        return target

    def _complete(self, scratch: Path, target: Path, step: int) -> None:
        files = [path for path in sorted(scratch.rglob("*")) if path.is_file()]
        sizes = {str(path.relative_to(scratch)): path.stat().st_size for path in files}
        write_durably(scratch / MANIFEST_FILE, msgspec.json.encode(CheckpointManifest(step=step, files=sizes)))
        sync_path(scratch)
        if target.exists():
            os.rename(target, self._folder / f"{_SCRATCH}replaced-{target.name}")
        os.rename(scratch, target)
        sync_path(self._folder)
        self._clear_scratch()
        present = {number: is_complete(path) for number, path in _steps(self._folder)}
        for number in to_remove(present, self._keep):
            self._remove(self._folder / f"step-{number:08d}")

    def _clear_scratch(self) -> None:
        for leftover in self._folder.glob(f"{_SCRATCH}*"):
            shutil.rmtree(leftover)

    def _remove(self, checkpoint: Path) -> None:
        # Renamed first: a crash in the middle of the removal must not leave a folder that looks like a checkpoint.
        doomed = self._folder / f"{_SCRATCH}removed-{checkpoint.name}"
        os.rename(checkpoint, doomed)
        shutil.rmtree(doomed)


def _steps(folder: Path) -> Iterable[tuple[int, Path]]:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            yield int(match[1]), path


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and wait until its contents are on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
