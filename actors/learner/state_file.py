# pyright: basic
# torch is only partly typed.
"""One rank's tensors in one safetensors file, written and read tensor by tensor, without a second copy in memory.

A file is what the format says: 8 bytes with the header's length, a JSON header, the tensors' bytes. `__metadata__`
holds one entry of ours, `headrace.places`: JSON that gives for each tensor its first element in the flattened whole and
the whole's shape. So any number of ranks can read what any other number wrote, and other tools can read each part.

Invariants:
- Nothing in a file is interpreted as anything but numbers and names, and every size is checked before it is used.
- A tensor is filled only with bytes that the files place in it, and each of its elements exactly once or with an error.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

from headrace.actors.learner.sharding import local_shard
from headrace.engine.errors import FormatError

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64"}
_PLACES = "headrace.places"
_MAX_HEADER_BYTES = 100 << 20  # the limit of the format's own readers
_ALIGNMENT = 8


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in the header: `data_offsets` are the first byte and the one after the last, behind the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a part belongs: its first element in the flattened whole, and the whole's shape."""

    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements [start, start + count) of a tensor of this dtype and shape, at a byte of a file."""

    path: Path
    offset: int
    start: int
    count: int
    dtype: str
    shape: tuple[int, ...]


def write_state_file(path: Path, tensors: Mapping[str, Tensor], *, writes_whole: bool) -> None:
    """Write this rank's parts of the tensors; returns when they are on disk.

    Args:
        path: Of the new file.
        tensors: Sharded ones on all ranks, or whole ones.
        writes_whole: Write the tensors that are not sharded too; true on one rank.

    Raises:
        OSError: The disk is full or not writable.
    """
    header: dict[str, Any] = {}
    places: dict[str, _Place] = {}
    parts: list[Tensor] = []
    end = 0
    for name, tensor in tensors.items():
        if not (writes_whole or isinstance(tensor, DTensor)):
            continue
        start, flat = local_shard(tensor)
        if not flat.numel():
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        size = flat.numel() * flat.element_size()
        header[name] = _Entry(_DTYPES[flat.dtype], tuple(local.shape), (end, end + size))
        places[name] = _Place(start, tuple(tensor.shape))
        parts.append(flat)
        end += size
    header["__metadata__"] = {_PLACES: msgspec.json.encode(places).decode()}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text))
        for part in parts:
            _write(file.fileno(), _bytes_of(part.cpu()))
        os.fsync(file.fileno())


def read_state_files(paths: Iterable[Path], tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's parts of the tensors from the files of all ranks that wrote.

    Raises:
        FormatError: A file is damaged, or together they do not hold exactly these tensors. The tensors may be half
            filled.
        OSError: A file cannot be read.
    """
    pieces: dict[str, list[_Piece]] = {}
    for path in paths:
        for name, piece in _read_header(path).items():
            pieces.setdefault(name, []).append(piece)
    foreign = sorted(pieces.keys() ^ {name for name, tensor in tensors.items() if tensor.numel()})
    if foreign:
        raise FormatError(f"{foreign[0]!r} is in the checkpoint or in the model, and not in both")
    for name, found in pieces.items():
        _fill(name, tensors[name], sorted(found, key=lambda piece: piece.start))


def _fill(name: str, tensor: Tensor, pieces: list[_Piece]) -> None:
    start, flat = local_shard(tensor)
    reached, end = start, start + flat.numel()
    for piece in pieces:
        if (piece.dtype, piece.shape) != (_DTYPES.get(flat.dtype), tuple(tensor.shape)):
            raise FormatError(
                f"{name!r} is {piece.dtype} {list(piece.shape)} in the checkpoint and {_DTYPES.get(flat.dtype)} "
                f"{list(tensor.shape)} in the model"
            )
        until = min(piece.start + piece.count, end)
        if piece.start <= reached < until:
            _read(piece, reached, flat[reached - start : until - start])
            reached = until
    if reached < end:
        raise FormatError(f"the checkpoint lacks elements {reached} to {end} of {name!r}")


def _read(piece: _Piece, first: int, target: Tensor) -> None:
    """Read the elements of a piece from `first` on into a flat tensor, as many as it has."""
    staged = target if target.device.type == "cpu" else torch.empty(target.shape, dtype=target.dtype)
    buffer, offset = _bytes_of(staged), piece.offset + (first - piece.start) * target.element_size()
    with piece.path.open("rb", buffering=0) as file:
        while buffer:
            count = os.preadv(file.fileno(), [buffer], offset)
            if not count:
                raise FormatError(f"{piece.path} is cut short")
            buffer, offset = buffer[count:], offset + count
    if staged is not target:
        target.copy_(staged)


def _read_header(path: Path) -> dict[str, _Piece]:
    """What a file holds, by the tensors' names."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        room = os.fstat(file.fileno()).st_size - 8 - size
        if not 0 < size <= _MAX_HEADER_BYTES or room < 0:
            raise FormatError(f"{path} is no state file: its header claims {size} bytes")
        text = file.read(size)
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__"), type=dict[str, str])
        places = msgspec.json.decode(metadata[_PLACES], type=dict[str, _Place])
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
        return {name: _piece(path, 8 + size, room, entry, places[name]) for name, entry in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise FormatError(f"{path} is no state file: {error}") from error


def _piece(path: Path, data: int, room: int, entry: _Entry, place: _Place) -> _Piece:
    begin, end = entry.data_offsets
    widths = {name: dtype.itemsize for dtype, name in _DTYPES.items()}
    width, count = widths.get(entry.dtype, 0), _product(entry.shape)
    if not (width and begin >= 0 and end <= room and end - begin == count * width):
        raise FormatError(f"{path} is no state file: {entry.dtype} {list(entry.shape)} at bytes {begin} to {end}")
    if place.start < 0 or place.start + count > _product(place.shape):
        raise FormatError(f"{path} is no state file: {count} elements from {place.start} of {list(place.shape)}")
    return _Piece(path, data + begin, place.start, count, entry.dtype, place.shape)


def _product(shape: tuple[int, ...]) -> int:
    """Elements of a shape; negative lengths count as more than there can be."""
    product = 1
    for length in shape:
        product *= length if length >= 0 else 1 << 62
    return product


def _bytes_of(flat: Tensor) -> memoryview:
    """The bytes of a flat tensor on the CPU, shared with it."""
    assert flat.is_contiguous()
    return flat.detach().view(torch.uint8).numpy().data


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
