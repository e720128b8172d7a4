"""First code of every child: watch the parent, then import and run what the child is for.

    python -m headrace.engine.supervision.bootstrap MODULE:FUNCTION JSON [DESCRIPTOR]

Standard input is a pipe that the parent holds open. Its end means that the parent is dead, and the whole process
group of this child is killed at once; the watch begins before anything heavy is imported.

DESCRIPTOR is a pipe for the reason of our end: the log may lie on the very disk that is full.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from typing import Any, cast

import msgspec

from headrace.engine.errors import HeadraceError

MAX_MESSAGE_CHARS = 4000  # a pipe takes so much at once, whether somebody reads or not


class ChildError(msgspec.Struct, frozen=True, kw_only=True):
    """How a child says why it ended."""

    kind: str
    message: str


def watch_parent() -> None:
    """Kill this process's own group when the parent's end of standard input closes. Returns at once.

    Only for a process that leads its group; `bootstrap` children do.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> int:
    """Run the child. The exit status is that of the error: 0, 1 (run) or 2 (usage)."""
    watch_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    from headrace.engine.plugins import load_object

    spec, arguments = sys.argv[1], cast("dict[str, Any]", msgspec.json.decode(sys.argv[2]))
    status = 0
    try:
        function = load_object(spec)
        assert callable(function), spec
        function(**arguments)
    except HeadraceError as error:
        logging.getLogger("headrace").info("ended by %s", type(error).__name__, exc_info=error)
        status = error.exit_code
        _say_why(type(error).__name__, str(error))
    except Exception as error:
        logging.getLogger("headrace").exception("ended by an unexpected error")
        status = 1
        _say_why("RunError", f"{type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(OSError):  # the disk of the log may be full
            sys.stdout.flush()
            sys.stderr.flush()
    return status


def _say_why(kind: str, message: str) -> None:
    text = message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 3] + "..."
    if len(sys.argv) > 3:
        os.write(int(sys.argv[3]), msgspec.json.encode(ChildError(kind=kind, message=text)))


if __name__ == "__main__":
    code = main()
    # Libraries leave threads behind that would keep a finished child alive.
    os._exit(code)
