"""The bytes of a bucket's payload: a header and the compressed planes. `docs/weight-format.md` has the table.

Planes are compressed here and nowhere else, each as one Zstandard frame, or stored as they are where that is no longer;
equal stored and plain sizes tell. Everything before compression is the same on every machine; compressed bytes vary by
the library's release, so nothing but the payload's checksum may depend on them.

Nothing is allocated on the word of a header: each announced size is bounded by the bucket's element count, which the
receiver knows from its own layout, and a frame must announce the size that the header implies.
"""

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from headrace.engine.errors import CorruptUpdateError
from headrace.engine.types import BucketEncoding
from headrace.engine.weights.gaps import max_gap_bytes
from headrace.engine.weights.layout import BUCKET_ELEMENTS
from headrace.engine.weights.ulp import Bytes

_LEVEL = 1

# Below this a frame's own header outweighs what it saves.
_MIN_COMPRESSED = 64

# change_checksum, num_changed, gap_bytes, num_escapes; the stored size of each plane follows.
_HEADER = struct.Struct("<QIII")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """What a payload says of itself.

    Attributes:
        change_checksum: Of the changed elements before and after (`planes.py`).
        num_changed: Elements that changed.
        gap_bytes: Size of the gap plane before compression.
        num_escapes: Elements whose step no byte holds; 0 in GAP_VALUE.
    """

    change_checksum: int
    num_changed: int
    gap_bytes: int
    num_escapes: int


class _Contexts(threading.local):
    """Zstandard's contexts are costly to make and serve one thread at a time."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def plane_sizes(encoding: BucketEncoding, header: FrameHeader, element_bytes: int) -> tuple[int, ...]:
    """Bytes of each plane before compression, in order."""
    if encoding is BucketEncoding.GAP_ULP:
        return (header.gap_bytes, header.num_changed, header.num_escapes * element_bytes)
    return (header.gap_bytes, *[header.num_changed] * element_bytes)


def compressed(plane: Bytes) -> bytes:
    """The plane as it is stored: one Zstandard frame, or the plane itself where that is no longer."""
    if len(plane) >= _MIN_COMPRESSED:
        packed = _contexts.compressor.compress(plane.data)
        if len(packed) < len(plane):
            return packed
    return plane.tobytes()


def pack_frame(header: FrameHeader, stored: Sequence[bytes]) -> bytes:
    """The payload of planes that `compressed` made."""
    head = _HEADER.pack(header.change_checksum, header.num_changed, header.gap_bytes, header.num_escapes)
    return b"".join((head, struct.pack(f"<{len(stored)}I", *map(len, stored)), *stored))


def unpack_frame(
    encoding: BucketEncoding, payload: bytes | memoryview, count: int, element_bytes: int
) -> tuple[FrameHeader, list[Bytes]]:
    """The header and the planes as they were before compression.

    Args:
        encoding: GAP_ULP or GAP_VALUE.
        payload: What `pack_frame` made.
        count: The bucket's elements.
        element_bytes: 2 or 4.

    Raises:
        CorruptUpdateError: A size is not possible, or not that of the bytes that are there, or a frame is damaged.
    """
    num_planes = 3 if encoding is BucketEncoding.GAP_ULP else 1 + element_bytes
    begin = _HEADER.size + 4 * num_planes
    if len(payload) < begin:
        raise CorruptUpdateError(f"a payload of {len(payload)} bytes was given; its header alone has {begin}")
    header = _read_header(payload)
    _check_sizes(encoding, header, count)
    stored_sizes: tuple[int, ...] = struct.unpack_from(f"<{num_planes}I", payload, _HEADER.size)
    if begin + sum(stored_sizes) != len(payload):
        raise CorruptUpdateError(
            f"a payload of {len(payload)} bytes was given; its header announces {begin + sum(stored_sizes)}"
        )
    planes: list[Bytes] = []
    view = memoryview(payload)
    for stored_size, plain_size in zip(stored_sizes, plane_sizes(encoding, header, element_bytes), strict=True):
        planes.append(_plain(view[begin : begin + stored_size], plain_size))
        begin += stored_size
    return header, planes


def _read_header(payload: bytes | memoryview) -> FrameHeader:
    change_checksum, num_changed, gap_bytes, num_escapes = _HEADER.unpack_from(payload)
    return FrameHeader(
        change_checksum=change_checksum, num_changed=num_changed, gap_bytes=gap_bytes, num_escapes=num_escapes
    )


def _check_sizes(encoding: BucketEncoding, header: FrameHeader, count: int) -> None:
    if not 0 < count <= BUCKET_ELEMENTS:
        raise CorruptUpdateError(f"a bucket of {count} elements was given; 1 to {BUCKET_ELEMENTS} are allowed")
    escapes_allowed = header.num_changed if encoding is BucketEncoding.GAP_ULP else 0
    if not 0 < header.num_changed <= count or header.num_escapes > escapes_allowed:
        raise CorruptUpdateError(
            f"{header.num_changed} changes with {header.num_escapes} escapes are announced in {count} elements"
        )
    if not header.num_changed <= header.gap_bytes <= max_gap_bytes(header.num_changed, count):
        raise CorruptUpdateError(f"{header.gap_bytes} bytes of gaps are announced for {header.num_changed} changes")


def _plain(stored: memoryview, plain_size: int) -> Bytes:
    if len(stored) == plain_size:
        return np.frombuffer(stored, np.uint8)
    try:
        announced = zstandard.get_frame_parameters(stored).content_size
        if announced != plain_size:
            raise CorruptUpdateError(f"a plane of {plain_size} bytes is awaited, but its frame announces {announced}")
        # One call knows its output's size and takes no window of its own, whatever the frame asks for.
        plain = _contexts.decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptUpdateError(f"a plane of {plain_size} bytes cannot be decompressed: {error}") from error
    if len(plain) != plain_size:
        raise CorruptUpdateError(f"a plane has {len(plain)} bytes after decompression, not {plain_size}")
    return np.frombuffer(plain, np.uint8)
