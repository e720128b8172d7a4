"""What travels between a pool and its workers: length-prefixed msgpack frames of typed structs.

A frame is a little-endian uint32 length and that many bytes of msgpack. The pool sends one `Setup`, then `Task`s; the
worker answers the setup with one `Hello`, and each sample of a task with one `Scored`. Nothing is ever unpickled.
"""

import asyncio
import struct
from typing import BinaryIO, Literal, TypeVar

import msgspec

from headrace.engine.errors import FormatError
from headrace.engine.types import RewardOutcome, RewardSample

MAX_FRAME_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")

Form = Literal["sync", "async", "batch"]
Frame = TypeVar("Frame", "Setup", "Hello", "Task", "Scored")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame to a worker.

    Attributes:
        function: `module:function` or `file.py:function`.
        search_path: Import folders of the pool's process, tried after the worker's own.
        timeout_s: One call of a coroutine function; plain functions are timed by the pool, from outside.
    """

    function: str
    search_path: tuple[str, ...]
    timeout_s: float


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame from a worker: how the function is called, or why it cannot be."""

    form: Form = "sync"
    error: str = ""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Samples for one worker. It takes the next task only when all of these are answered."""

    samples: list[RewardSample]


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the sample at `index` of the current task."""

    index: int
    outcome: RewardOutcome


def pack(message: Setup | Hello | Task | Scored) -> bytes:
    """Encode one frame.

    Raises:
        FormatError: The message is larger than a frame may be.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FormatError(f"a frame of {len(body)} bytes was to be sent to or from a reward worker; the limit is 1 GiB")
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, kind: type[Frame]) -> Frame:
    """Wait for one frame. Cancelling leaves the stream unusable: end the worker then.

    Raises:
        EOFError: The worker closed its end (`asyncio.IncompleteReadError`).
        FormatError: The bytes are not such a frame.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    _check_length(length)
    return _decode(await reader.readexactly(length), kind)


def read_frame_blocking(stream: BinaryIO, kind: type[Frame]) -> Frame | None:
    """Block for one frame; None when the other side is gone, also in the middle of a frame."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    _check_length(length)
    body = stream.read(length)
    return None if len(body) < length else _decode(body, kind)


def _check_length(length: int) -> None:
    if length > MAX_FRAME_BYTES:
        raise FormatError(f"a frame of {length} bytes was announced between reward pool and worker; the limit is 1 GiB")


def _decode(body: bytes, kind: type[Frame]) -> Frame:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise FormatError(f"a frame between reward pool and worker is not a {kind.__name__}: {error}") from error
