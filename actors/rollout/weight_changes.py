"""What changes in a checkpoint's tensors, as absolute values: the input of the in-place scatter.

A change file carries it to every worker of a host: decoded once, mapped read-only by each, with nothing in it but
numbers. Values are absolute, so applying a change twice does no harm.
"""

import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engine.errors import CorruptUpdateError, InputError

PositionArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
ValueArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

# Arrays start at multiples of this, so that each can be mapped at its own width.
_ALIGNMENT = 16


class WeightChange(msgspec.Struct, frozen=True, kw_only=True):
    """New values of some elements of one checkpoint tensor.

    Attributes:
        name: Of the tensor in the checkpoint.
        positions: int32 or int64 [K], strictly increasing flat indices; None: `values` is the range from `start` on.
        values: uint16 or uint32 [K], the bits of the tensor's dtype (bfloat16 and float16, or float32).
        start: First element of a dense range; 0 with positions.
    """

    name: str
    values: ValueArray
    positions: PositionArray | None = None
    start: int = 0


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """Where one change lies in the file; widths in bytes, 0 for a dense range's positions."""

    name: str
    start: int
    count: int
    position_bytes: int
    positions_at: int
    value_bytes: int
    values_at: int


class ChangeFile(msgspec.Struct, frozen=True, kw_only=True):
    """The control message: a path of this host and the table of what lies there.

    Attributes:
        path: Of the file of raw little-endian arrays.
        digest: Of the whole state once the change is applied; what the receiver answers with.
        entries: The table.
    """

    path: str
    digest: int
    entries: tuple[_Entry, ...]


def check_change(change: WeightChange, num_elements: int) -> None:
    """Refuse a change that does not fit its tensor. Reads all positions once.

    Raises:
        CorruptUpdateError: Positions do not increase strictly, lie outside the tensor or are not as many as the values.
    """
    count = len(change.values)
    if change.positions is None:
        if change.start < 0 or change.start + count > num_elements:
            raise CorruptUpdateError(
                f"The change of {change.name!r} covers [{change.start}, {change.start + count}); "
                f"the tensor has {num_elements} elements."
            )
        return
    positions = change.positions
    if len(positions) != count:
        raise CorruptUpdateError(f"The change of {change.name!r} has {len(positions)} positions for {count} values.")
    if not count:
        return
    if int(positions[0]) < 0 or int(positions[-1]) >= num_elements or not bool(np.all(positions[1:] > positions[:-1])):
        raise CorruptUpdateError(
            f"The positions of {change.name!r} must increase strictly and lie in [0, {num_elements}); "
            "send the update again."
        )


def write_changes(path: Path, changes: Iterable[WeightChange], *, digest: int = 0) -> ChangeFile:
    """Write a change file for `read_changes`. Blocks while it writes.

    Raises:
        InputError: An array is not of the widths that `WeightChange` names.
    """
    entries: list[_Entry] = []
    with path.open("wb") as file:

        def put(array: npt.NDArray[Any]) -> int:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            at = file.tell()
            file.write(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).data)
            return at

        for change in changes:
            positions, values = change.positions, change.values
            if values.dtype.kind != "u" or values.itemsize not in (2, 4):
                raise InputError(
                    f"The values of {change.name!r} are {values.dtype}; give their bits, uint16 or uint32."
                )
            if positions is not None and (positions.dtype.kind != "i" or positions.itemsize not in (4, 8)):
                raise InputError(f"The positions of {change.name!r} are {positions.dtype}; give int32 or int64.")
            entries.append(
                _Entry(
                    change.name,
                    change.start,
                    len(values),
                    0 if positions is None else positions.itemsize,
                    0 if positions is None else put(positions),
                    values.itemsize,
                    put(values),
                )
            )
    return ChangeFile(path=str(path), digest=digest, entries=tuple(entries))


def read_changes(message: ChangeFile) -> Sequence[WeightChange]:
    """Map a change file read-only. The arrays keep the mapping alive, whatever happens to the file's name.

    Raises:
        CorruptUpdateError: The file cannot be read or is shorter than its table says, or the table is nonsense.
    """
    try:
        with open(message.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        if not message.entries:
            return ()
        raise CorruptUpdateError(f"The change file {message.path} cannot be mapped: {error}.") from error
    return tuple(_read_entry(mapped, entry, message.path) for entry in message.entries)


def _read_entry(mapped: mmap.mmap, entry: _Entry, path: str) -> WeightChange:
    if entry.position_bytes not in (0, 4, 8) or entry.value_bytes not in (2, 4) or entry.count < 0:
        raise CorruptUpdateError(f"The table of {path} describes {entry.name!r} with impossible widths.")

    def take(width: int, at: int, kind: str) -> npt.NDArray[Any]:
        if at < 0 or at + width * entry.count > len(mapped):
            raise CorruptUpdateError(f"{path} ends before the change of {entry.name!r} does.")
        return np.frombuffer(mapped, f"<{kind}{width}", entry.count, at)

    positions = take(entry.position_bytes, entry.positions_at, "i") if entry.position_bytes else None
    values = take(entry.value_bytes, entry.values_at, "u")
    return WeightChange(name=entry.name, values=values, positions=positions, start=entry.start)
