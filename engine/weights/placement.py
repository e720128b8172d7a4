"""Files for payloads, whose whole size is reserved before anything is written."""

import errno
import os
from pathlib import Path

from headrace.engine.errors import StorageError


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
