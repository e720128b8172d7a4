"""A text file that grows by whole lines.

Invariants:
    A line is in the file wholly or not at all, whatever the disk does: a write that falls short is cut back.
    A crash may tear the last line; whoever opens the file next cuts the torn piece off.
One writer a file.
"""

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from headrace.engine.errors import StorageError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BLOCK_BYTES = 1 << 16


def storage_error(path: Path, error: OSError) -> StorageError:
    """One sentence for an error of the disk that names the path and what to change."""
    if error.errno in _FULL:
        return StorageError(f"the disk of {path} is full: free some space there or set run.folder to another disk")
    reason = error.strerror or str(error)
    return StorageError(f"{path} cannot be written ({reason}): make it writable or set run.folder to another place")


class LineFile:
    """Appends lines; each is handed to the system at once, so that a reader sees it and a dead process loses none."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending, made if it is missing; a torn last line is cut off.

        Raises:
            StorageError: The file cannot be opened or cut.
        """
        self.path = path
        cut_torn_line(path)
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_error(path, error) from error

    def append(self, line: bytes) -> None:
        """Write `line` and a line feed. Blocks for the write, not for the disk's own cache.

        Raises:
            StorageError: The disk is full or not writable; nothing of the line stays in the file.
        """
        data = line + b"\n"
        size = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            raise storage_error(self.path, error) from error

    def close(self) -> None:
        """May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def cut_torn_line(path: Path) -> int:
    """Cut what follows the last line feed; returns how many bytes went. A missing file has none.

    Raises:
        StorageError: The file cannot be read or cut.
    """
    try:
        if not path.is_file():
            return 0
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            end = size
            while end > 0:
                start = max(0, end - _BLOCK_BYTES)
                file.seek(start)
                place = file.read(end - start).rfind(b"\n")
                if place >= 0:
                    end = start + place + 1
                    break
                end = start
            if end < size:
                file.truncate(end)
            return size - end
    except OSError as error:
        raise storage_error(path, error) from error


def cut_lines_from(path: Path, is_first_to_go: Callable[[bytes], bool]) -> int:
    """Cut the file at the first line for which `is_first_to_go` holds; returns how many lines went.

    Raises:
        StorageError: The file cannot be read or cut.
    """
    try:
        if not path.is_file():
            return 0
        num_cut = 0
        keep_bytes = 0
        with path.open("r+b") as file:
            for line in file:
                if num_cut or is_first_to_go(line):
                    num_cut += 1
                else:
                    keep_bytes += len(line)
            if num_cut:
                file.truncate(keep_bytes)
        return num_cut
    except OSError as error:
        raise storage_error(path, error) from error


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one move: a reader sees the old file or the new one.

    Raises:
        StorageError: The disk is full or not writable; the old file is untouched.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise storage_error(path, error) from error
