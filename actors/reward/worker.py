"""The process that runs user code for a pool: `python -m headrace.actors.reward.worker`, started by the pool alone.

Frames come in on standard input and leave on what was standard output. Both are moved to private descriptors before any
user code is loaded: the user's prints go to standard error, and reading standard input finds nothing.

The process never outlives its pool. A thread reads the frames, so it sees the end of the stream also while user code
runs, and then ends the process group. Code that holds the interpreter's lock (a runaway regular expression) keeps that
thread from running, so on Linux the kernel is asked to send SIGKILL when the thread that started the worker ends.
"""

import asyncio
import ctypes
import os
import queue
import signal
import sys
import threading
from typing import BinaryIO

from headrace.actors.reward.frames import Hello, Scored, Setup, Task, pack, read_frame_blocking
from headrace.actors.reward.function import ScoringFunction, load_scoring_function
from headrace.engine.errors import ConfigError

_PR_SET_PDEATHSIG = 1
_EXIT_GRACE_S = 2.0


def main() -> None:
    """Serve tasks until the pool closes the stream."""
    _die_with_parent()
    os.environ["HEADRACE_REWARD_WORKER"] = "1"  # `headrace.clients.reward.serve` refuses to run in here
    tasks_in, results_out = _private_streams()
    setup = read_frame_blocking(tasks_in, Setup)
    if setup is None:
        return
    sys.path.extend(folder for folder in setup.search_path if folder not in sys.path)
    inbox = _Inbox(tasks_in)  # from here on the end of the stream is seen, so also while a slow module is imported
    try:
        function = load_scoring_function(setup.function)
    except ConfigError as error:
        _send(results_out, pack(Hello(error=str(error))))
        return
    _send(results_out, pack(Hello(form=function.form)))
    if function.form == "async":
        with asyncio.Runner() as runner:
            while (task := inbox.next()) is not None:
                runner.run(_score_async(function, task, setup.timeout_s, results_out))
    else:
        while (task := inbox.next()) is not None:
            _score(function, task, results_out)


class _Inbox:
    """Reads frames in a thread of its own and ends the process when the pool is gone."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._never = threading.Event()
        threading.Thread(target=self._read, name="headrace-inbox", daemon=True).start()

    def next(self) -> Task | None:
        """Wait for the next task; None when the pool has closed the stream."""
        self._idle.set()
        task = self._queue.get()
        self._idle.clear()
        return task

    def _read(self) -> None:
        while (task := read_frame_blocking(self._stream, Task)) is not None:
            self._queue.put(task)
        if not self._idle.is_set():
            _end_group()
        self._queue.put(None)
        self._never.wait(_EXIT_GRACE_S)  # exit handlers of user code get this long
        _end_group()


def _score(function: ScoringFunction, task: Task, out: BinaryIO) -> None:
    if function.form == "batch":
        outcomes = function.call_batch(task.samples)
    else:
        outcomes = [function.call(sample) for sample in task.samples]
    _send(out, b"".join(pack(Scored(index=i, outcome=outcome)) for i, outcome in enumerate(outcomes)))


async def _score_async(function: ScoringFunction, task: Task, timeout_s: float, out: BinaryIO) -> None:
    async def score_one(index: int) -> None:
        outcome = await function.call_async(task.samples[index], timeout_s)
        _send(out, pack(Scored(index=index, outcome=outcome)))

    await asyncio.gather(*(score_one(index) for index in range(len(task.samples))))


def _send(out: BinaryIO, data: bytes) -> None:
    out.write(data)
    out.flush()


def _private_streams() -> tuple[BinaryIO, BinaryIO]:
    tasks_in = os.fdopen(os.dup(0), "rb")
    results_out = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return tasks_in, results_out


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end_group() -> None:
    if os.getpgid(0) == os.getpid():  # our own group: what user code started goes too
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
