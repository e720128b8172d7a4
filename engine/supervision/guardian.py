"""Ends the process groups of a supervisor that has died, and removes its temporary folders.

A guardian is a tiny process in a session of its own that reads a pipe from its supervisor. The supervisor names the
process groups that it starts and the folders that it makes; at end of file, which a SIGKILL of the supervisor causes
too, the guardian kills and removes those that are left. Inference engines keep worker processes below their front end
that outlive it by half a minute.

Only groups that this supervisor started are ever ended. A group is struck off once its leader has been reaped and the
rest of it killed, so a number that the kernel gives away again is not hit.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

# Runs under `python -I -S`: no site, no environment, a few milliseconds.
_PROGRAM = """
import os, signal, sys
for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(name, signal.SIG_IGN)
groups = set()
folders = set()
for line in sys.stdin.buffer:
    verb, what = line[:1], line[2:-1]
    if verb == b"f":
        folders.add(what)
    else:
        (groups.add if verb == b"+" else groups.discard)(int(what))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
if any(os.path.lexists(folder) for folder in folders):
    import shutil, time
    for _ in range(50):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        if not any(os.path.lexists(folder) for folder in folders):
            break
        time.sleep(0.1)  # somebody who is being killed was still writing there
"""


class Guardian:
    """The supervisor's end. Not for use from several threads at once."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        self._pipe: IO[bytes] = self._process.stdin

    @property
    def pid(self) -> int:
        """The guardian's own process."""
        return self._process.pid

    def watch(self, group: int) -> None:
        """Kill this process group when the supervisor dies."""
        self._tell(b"+ %d\n" % group)

    def remove(self, folder: Path) -> None:
        """Remove this folder, which the supervisor has made, when the supervisor dies or closes the guardian."""
        name = os.fsencode(folder.absolute())
        if b"\n" not in name:  # such a name would be cut into another one
            self._tell(b"f " + name + b"\n")

    def forget(self, group: int) -> None:
        """The group is gone."""
        self._tell(b"- %d\n" % group)

    def close(self) -> None:
        """End the guardian; groups that it still watches are killed, its folders removed. May be called twice."""
        if not self._pipe.closed:
            self._pipe.close()
        self._process.wait()

    def _tell(self, line: bytes) -> None:
        # A guardian that somebody killed must not take the run with it: children watch their pipes too.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._pipe.write(line)
