"""Weights read from what describes itself: a change file, a safetensors file, or a checkpoint's folder of these.

The payloads of keyframes and deltas are bare numbers, whose manifests travel apart from them; they cannot be read here.
"""

import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.engine.errors import FormatError, UsageError
from headrace.engine.types import TensorSpec
from headrace.engine.weights.changes import MAGIC, ChangeTable, WeightChange, read_change_file
from headrace.engine.weights.layout import num_elements, raw_dtype
from headrace.engine.weights.ulp import RawArray

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_MAX_HEADER_BYTES = 100 << 20


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Tensors by name: what they are, and their bits, flat and mapped read-only."""

    path: Path
    tensors: dict[str, tuple[TensorSpec, RawArray]] = field(default_factory=dict[str, tuple[TensorSpec, RawArray]])

    @property
    def num_elements(self) -> int:
        """Of all tensors."""
        return sum(len(bits) for _, bits in self.tensors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """A change file."""

    path: Path
    table: ChangeTable
    changes: tuple[WeightChange, ...]


def open_weights(path: Path) -> Checkpoint | Changes:
    """Map what is at `path`: a change file, a .safetensors file, or a folder of these.

    Raises:
        UsageError: There is nothing, or nothing that is known.
        CorruptUpdateError: A change file is damaged.
        FormatError: A safetensors file is not what the format says.
    """
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise UsageError(f"{path} holds no .safetensors file; give a checkpoint's folder or a file")
        tensors: dict[str, tuple[TensorSpec, RawArray]] = {}
        for file in files:
            tensors |= _read_safetensors(file)
        return Checkpoint(path=path, tensors=tensors)
    if not path.is_file():
        raise UsageError(f"there is no {path}; give a change file, a .safetensors file or a checkpoint's folder")
    with path.open("rb") as opened:
        magic = opened.read(len(MAGIC))
    if magic == MAGIC:
        table, changes = read_change_file(path)
        return Changes(path=path, table=table, changes=tuple(changes))
    return Checkpoint(path=path, tensors=_read_safetensors(path))


def _read_safetensors(path: Path) -> dict[str, tuple[TensorSpec, RawArray]]:
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be mapped: {error}") from error
    begin = 8 + int.from_bytes(mapped[:8], "little")
    if len(mapped) < 8 or begin > min(len(mapped), _MAX_HEADER_BYTES):
        raise FormatError(f"{path} is neither a change file nor a safetensors file: its header does not fit")
    try:
        header = msgspec.json.decode(mapped[8:begin], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in header.items()}
    except msgspec.MsgspecError as error:
        raise FormatError(f"{path} is neither a change file nor a safetensors file: {error}") from error
    return {name: _tensor(path, mapped, begin, name, entry) for name, entry in entries.items()}


def _tensor(path: Path, mapped: mmap.mmap, begin: int, name: str, entry: _Tensor) -> tuple[TensorSpec, RawArray]:
    if entry.dtype not in _DTYPES:
        raise FormatError(f"{name!r} in {path} is {entry.dtype}; known are {', '.join(_DTYPES)}")
    spec = TensorSpec(name=name, dtype=_DTYPES[entry.dtype], shape=entry.shape)
    dtype: np.dtype[Any] = np.dtype(raw_dtype(spec.dtype))
    count = num_elements(spec)
    start, end = entry.data_offsets
    if start < 0 or end - start != count * dtype.itemsize or begin + end > len(mapped):
        raise FormatError(f"{name!r} in {path} has {end - start} bytes at {start}; its shape does not fit there")
    return spec, np.frombuffer(mapped, dtype, count, begin + start)
