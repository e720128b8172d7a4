"""Where payload files lie: shared memory if it has room, a folder on disk otherwise."""

import contextlib
import errno
import logging
import os
import tempfile
from pathlib import Path

from headrace.engine.errors import StorageError

_LOG = logging.getLogger(__name__)


def place_payload_dir(preferred: Path, *, fallback: Path | None = None, needed_bytes: int = 0) -> Path:
    """Make and return a private folder for payloads: `preferred`, usually in shared memory, if it has room.

    Args:
        preferred: Where payloads should lie, for example a folder in /dev/shm.
        fallback: The folder on disk to use otherwise; one of the same name in the temporary folder by default.
        needed_bytes: Room that must be free, for all versions that are kept at a time.

    Raises:
        StorageError: Neither folder can be made.
    """
    other = fallback if fallback is not None else Path(tempfile.gettempdir()) / preferred.name
    reason = ""
    try:
        preferred.mkdir(mode=0o700, parents=True, exist_ok=True)
        room = os.statvfs(preferred)
        free = room.f_bavail * room.f_frsize
        if free >= needed_bytes and os.access(preferred, os.W_OK):
            return preferred
        reason = f"{free} of {needed_bytes} bytes are free"
        with contextlib.suppress(OSError):
            preferred.rmdir()
    except OSError as error:
        reason = str(error.strerror)
    try:
        other.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"No payload folder: {preferred}: {reason}; {other}: {error.strerror}.") from error
    _LOG.warning("Weight payloads go to %s, because in %s %s; updates will be slower.", other, preferred, reason)
    return other


def open_reserved(path: Path, size: int) -> int:
    """Create or join a file and reserve its size; returns a descriptor that the caller closes.

    Raises:
        StorageError: There is no room, the folder is not writable, or the path holds a longer file.
    """
    created = True
    try:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            created = False
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"The payload file {path} cannot be opened: {error.strerror}.") from error
    try:
        status, room = os.fstat(fd), os.fstatvfs(fd)
        if status.st_size > size:
            raise StorageError(f"{path} is longer than the {size} bytes of this layout; choose another path.")
        # Asked first, because reserving in vain would fill the folder for a moment, to the harm of its neighbours.
        if size - status.st_blocks * 512 > room.f_bavail * room.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if size:
            os.posix_fallocate(fd, 0, size)
    except BaseException as error:
        os.close(fd)
        if created:
            path.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        what = "there is no room" if error.errno == errno.ENOSPC else error.strerror
        raise StorageError(f"Reserving {size} bytes for {path} failed: {what}; free or enlarge that folder.") from error
    return fd
