"""The folder in shared memory that holds weight payloads, and the end of those that dead runs left behind.

Invariant: a folder belongs to a live run exactly while its lock file is locked; the kernel lets go of the lock of a
process that dies in whatever way.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from headrace.engine.errors import StorageError

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "headrace-weights-"
_LOCK = ".lock"


class PayloadFolder:
    """A private folder, removed by `close` or by the next run on this host after a crash."""

    def __init__(self, run_id: str, parent: Path | None = None) -> None:
        """Make the folder below `parent`: shared memory by default, the temporary folder where there is none.

        Raises:
            StorageError: It cannot be made.
        """
        if parent is None:
            parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        remove_left_over(parent)
        self.path = parent / f"{_PREFIX}{run_id}"
        try:
            self.path.mkdir(mode=0o700)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(f"cannot make the folder for weights {self.path}: {error.strerror}") from error
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the folder and all that is in it. May be called twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_left_over(parent: Path) -> list[Path]:
    """Remove the folders of runs whose hub is dead, and no others; returns them."""
    removed: list[Path] = []
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                removed.append(folder)
            finally:
                os.close(lock)
    return removed
