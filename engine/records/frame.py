"""The frame around every encoded record and column: fixed header, msgpack body, raw arrays.

Invariants:

- All integers are little-endian. The body starts at byte 24; each array starts at the next multiple of 8 after what
  comes before it; the frame ends at a multiple of 8; gaps are zero bytes.
- No length is believed before it has been compared with the bytes that are really there, so a tiny frame cannot make a
  reader allocate more than a small multiple of its own size.
- Reading executes nothing: the body is decoded into typed structs, arrays have one of five plain dtypes.

The byte layout is specified in docs/record-format.md.
"""

import mmap
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias, cast

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engine.errors import FormatError, InputError, SchemaError

MAGIC = b"HDRC"
FORMAT_VERSION = 1
KIND_TRAJECTORY = 1
KIND_COLUMN = 2
HEADER_BYTES = 24
ALIGNMENT = 8
MAX_DIMENSIONS = 8

# magic, format version, kind, flags, CRC32C, body bytes, total bytes
_HEADER = struct.Struct("<4sBBHIIQ")
# The checksum covers everything behind its own field; the fields before it are compared with constants.
_CHECKED_FROM = 12
_AFTER_CHECKSUM = struct.Struct("<IQ")
_BEFORE_BODY = struct.Struct("<4sBBHI")
_MAX_BODY_BYTES = 2**32 - 1
# The package has no types for its functions.
_crc32c = cast(
    "Callable[[bytes | npt.NDArray[np.uint8]], int]",
    google_crc32c.value,  # pyright: ignore[reportUnknownMemberType]
)
_GAPS = tuple(bytes(gap) for gap in range(ALIGNMENT))

# What encoded bytes may lie in. Only read-only ones are decoded without a copy.
Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap | npt.NDArray[np.uint8]

DTYPES: dict[str, np.dtype[Any]] = {
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "uint8": np.dtype("u1"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Uint63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Uint32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class ArrayEntry(msgspec.Struct, frozen=True, array_like=True):
    """One row of a frame's array table: `[name, dtype, shape, num_bytes]`; later formats may append to it."""

    name: str
    dtype: str
    shape: tuple[Uint63, ...]
    num_bytes: Uint63


class Frame(NamedTuple):
    """A frame whose header and checksum have been verified.

    Attributes:
        content: uint8 [total bytes], read-only, keeps the caller's buffer alive.
        body_bytes: Length of the msgpack body, which starts at byte 24.
    """

    content: npt.NDArray[np.uint8]
    body_bytes: int

    def body(self) -> memoryview:
        """The msgpack body, a view."""
        return self.content[HEADER_BYTES : HEADER_BYTES + self.body_bytes].data


def array_entry(name: str, array: npt.NDArray[Any]) -> ArrayEntry:
    """Describe an array for the table.

    Raises:
        SchemaError: The dtype is not one of the five that records hold.
    """
    dtype = _NAMES.get(array.dtype)
    if dtype is None:
        raise SchemaError(f"array {name!r} has dtype {array.dtype}; records hold {', '.join(DTYPES)}; convert it first")
    return ArrayEntry(name, dtype, array.shape, array.nbytes)


def pack(kind: int, body: bytes, arrays: Sequence[npt.NDArray[Any]]) -> bytes:
    """Lay out a frame. `arrays` are those of the body's array table, in its order.

    Raises:
        InputError: The body is 4 GiB or more.
    """
    if len(body) > _MAX_BODY_BYTES:
        raise InputError(f"the texts and data of one record take {len(body)} bytes; at most {_MAX_BODY_BYTES} fit")
    gap = -len(body) % ALIGNMENT
    parts: list[Any] = [b"", body, _GAPS[gap]]
    total = HEADER_BYTES + len(body) + gap
    for array in arrays:
        num_bytes = array.nbytes
        gap = -num_bytes % ALIGNMENT
        # Copies only where the elements do not lie side by side; makes a row of a 0-d array, which join refuses.
        parts.append(array if array.ndim == 1 and array.flags.c_contiguous else np.ascontiguousarray(array).reshape(-1))
        parts.append(_GAPS[gap])
        total += num_bytes + gap
    parts[0] = _AFTER_CHECKSUM.pack(len(body), total)
    checked = b"".join(parts)
    return _BEFORE_BODY.pack(MAGIC, FORMAT_VERSION, kind, 0, _crc32c(checked)) + checked


def open_frame(data: Buffer, kind: int, *, copy: bool) -> Frame:
    """Verify header, length and checksum; reads every byte once.

    Args:
        data: Exactly one frame. A read-only buffer is held by the result, not copied.
        kind: KIND_TRAJECTORY or KIND_COLUMN.
        copy: Take a private copy first, which makes a writable buffer acceptable.

    Raises:
        InputError: The buffer is writable and `copy` is false, or it is not contiguous.
        FormatError: The bytes are not one whole, undamaged frame of this kind and major version.
    """
    if copy:
        data = bytes(data)
    try:
        content = np.frombuffer(data, np.uint8)
    except (ValueError, BufferError) as error:
        raise InputError(f"a record is decoded from one contiguous buffer of bytes: {error}") from error
    if content.flags.writeable:
        raise InputError("a record was given in a writable buffer, which may change under it; pass bytes or copy=True")
    if content.size < HEADER_BYTES:
        raise FormatError(f"a record has at least {HEADER_BYTES} bytes; {content.size} were received")
    magic, version, found_kind, flags, checksum, body_bytes, total = _HEADER.unpack_from(content.data)
    if magic != MAGIC:
        raise FormatError(f"these bytes are not a record: they start with {magic!r}, a record with {MAGIC!r}")
    if version != FORMAT_VERSION:
        raise FormatError(f"record format {version} was received; this reader knows format {FORMAT_VERSION}")
    if found_kind != kind or flags != 0:
        raise FormatError(f"a frame of kind {found_kind} with flags {flags} was received; kind {kind} was expected")
    if total != content.size or total % ALIGNMENT or body_bytes > total - HEADER_BYTES:
        raise FormatError(f"a record says that it has {total} bytes ({body_bytes} of body); {content.size} are there")
    if _crc32c(content[_CHECKED_FROM:]) != checksum:
        raise FormatError("a record's checksum does not agree with its bytes; it was damaged on the way or on disk")
    return Frame(content, body_bytes)


def locate(frame: Frame, entries: Sequence[ArrayEntry]) -> dict[str, tuple[ArrayEntry, int]]:
    """Find where each array of the table starts; checks that together they fill the frame exactly.

    Raises:
        FormatError: A name appears twice, or the arrays and the frame do not have the same length.
    """
    places: dict[str, tuple[ArrayEntry, int]] = {}
    position = HEADER_BYTES + frame.body_bytes
    total = frame.content.size
    for entry in entries:
        start = position + -position % ALIGNMENT
        position = start + entry.num_bytes
        if position > total or entry.name in places:
            raise FormatError(f"array {entry.name!r} appears twice or reaches beyond the {total} bytes of its record")
        places[entry.name] = (entry, start)
    if position + -position % ALIGNMENT != total:
        raise FormatError(f"the arrays of a record end at byte {position}; the record has {total} bytes")
    return places


def check_shape(entry: ArrayEntry) -> np.dtype[Any]:
    """The dtype of a table row whose dtype, shape and byte count agree.

    Raises:
        FormatError: The dtype is unknown, or shape times item size is not the byte count.
    """
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise FormatError(f"array {entry.name!r} has dtype {entry.dtype[:40]!r}; records hold {', '.join(DTYPES)}")
    count = 1
    if len(entry.shape) > MAX_DIMENSIONS:
        raise FormatError(
            f"array {entry.name!r} has {len(entry.shape)} dimensions; at most {MAX_DIMENSIONS} are allowed"
        )
    for length in entry.shape:  # Python integers do not overflow
        count *= length
    if count * dtype.itemsize != entry.num_bytes:
        raise FormatError(
            f"array {entry.name!r} of {count} {entry.dtype} elements needs {count * dtype.itemsize} bytes; "
            f"{entry.num_bytes} are given"
        )
    return dtype


def view(frame: Frame, entry: ArrayEntry, start: int) -> npt.NDArray[Any]:
    """A read-only view of one array; shares the frame's memory and keeps it alive.

    Raises:
        FormatError: See `check_shape`.
    """
    dtype = check_shape(entry)
    flat = frame.content[start : start + entry.num_bytes].view(dtype)
    return flat if len(entry.shape) == 1 else flat.reshape(entry.shape)
