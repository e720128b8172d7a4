"""What changes in a checkpoint's tensors, as absolute values, in a file that describes itself.

A host decodes an update once; a change file carries the outcome to each of its workers, which map it read-only. There
is nothing in it but numbers and names, and applying a change twice does no harm, because values are absolute.

    0            header, 64 bytes: magic, format, where the table is, checksums
    64           the arrays, little-endian, each at a multiple of 16
    table        msgpack: run, base, version, digest of the new state, and where the arrays of each change lie

Invariants:

1. A file appears under its name whole, or not at all: it is written under another one and renamed.
2. Nothing is read on the word of the file: magic, sizes, both checksums and all bounds are checked first.
"""

import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from headrace.engine.errors import CorruptUpdateError, InputError, StorageError
from headrace.engine.types import PolicyVersion
from headrace.engine.weights.ulp import RawArray

PositionArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
ValueArray = RawArray

MAGIC = b"HRCHANGE"
_FORMAT = 1

# magic, format, nothing, table_at, table_bytes, table_checksum, data_checksum
_HEADER = struct.Struct("<8sIIQQQQ")
_DATA_AT = 64

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


class ChangeEntry(msgspec.Struct, frozen=True, array_like=True):
    """Where one change lies in the file; widths in bytes, 0 for a dense range's positions."""

    name: str
    start: int
    count: int
    position_bytes: int
    positions_at: int
    value_bytes: int
    values_at: int


class ChangeTable(msgspec.Struct, frozen=True, kw_only=True):
    """What a change file says of itself.

    Attributes:
        run_id: Empty where the file belongs to no run.
        base: What the changes start from; None where nobody asks.
        version: What they lead to.
        digest: Of the whole state once they are applied.
        entries: A tensor may have several, which do not overlap.
    """

    run_id: str = ""
    base: PolicyVersion | None = None
    version: PolicyVersion | None = None
    digest: int = 0
    entries: tuple[ChangeEntry, ...] = ()


class ChangeFile(msgspec.Struct, frozen=True, kw_only=True):
    """The control message: a path of this host, and the digest that must stand in the file."""

    path: str
    digest: int


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


def write_changes(
    path: Path,
    changes: Iterable[WeightChange],
    *,
    digest: int = 0,
    run_id: str = "",
    base: PolicyVersion | None = None,
    version: PolicyVersion | None = None,
) -> ChangeFile:
    """Write a change file for `read_changes`. Blocks while it writes; on any error nothing is left at `path`.

    Args:
        path: Where the file appears once it is whole.
        changes: Taken one at a time, so that a generator needs no more memory than one of them.
        digest, run_id, base, version: See `ChangeTable`.

    Raises:
        InputError: An array is not of the widths that `WeightChange` names.
        StorageError: The disk or shared memory is full, or not writable.
    """
    unfinished = path.with_name(path.name + ".part")
    try:
        with unfinished.open("wb") as file:
            writer = _Writer(file)
            entries = tuple(writer.put(change) for change in changes)
            table = ChangeTable(run_id=run_id, base=base, version=version, digest=digest, entries=entries)
            writer.finish(msgspec.msgpack.encode(table))
        os.replace(unfinished, path)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StorageError(f"The change file {path} cannot be written: {error.strerror}.") from error
        raise
    return ChangeFile(path=str(path), digest=digest)


def read_changes(message: ChangeFile) -> Sequence[WeightChange]:
    """Map a change file read-only. The arrays keep the mapping alive, whatever happens to the file's name.

    Raises:
        CorruptUpdateError: The file cannot be read, is damaged or cut short, or is not the one that is meant.
    """
    table, changes = read_change_file(Path(message.path))
    if table.digest != message.digest:
        raise CorruptUpdateError(
            f"The change file {message.path} leads to the digest {table.digest:016x}, not {message.digest:016x}."
        )
    return changes


def read_change_file(path: Path) -> tuple[ChangeTable, Sequence[WeightChange]]:
    """The table and the changes, mapped read-only. Reads the file once for its checksum; blocks meanwhile.

    Raises:
        CorruptUpdateError: The file cannot be read, is damaged or cut short.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CorruptUpdateError(f"The change file {path} cannot be mapped: {error}.") from error
    table, end = _read_table(mapped, path)
    return table, tuple(_read_entry(mapped, entry, end, path) for entry in table.entries)


class _Writer:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = xxhash.xxh3_64()
        self._at = _DATA_AT
        file.write(bytes(_DATA_AT))

    def put(self, change: WeightChange) -> ChangeEntry:
        positions, values = change.positions, change.values
        if values.dtype.kind != "u" or values.itemsize not in (2, 4):
            raise InputError(f"The values of {change.name!r} are {values.dtype}; give their bits, uint16 or uint32.")
        if positions is not None and (positions.dtype.kind != "i" or positions.itemsize not in (4, 8)):
            raise InputError(f"The positions of {change.name!r} are {positions.dtype}; give int32 or int64.")
        return ChangeEntry(
            change.name,
            change.start,
            len(values),
            0 if positions is None else positions.itemsize,
            0 if positions is None else self._array(positions),
            values.itemsize,
            self._array(values),
        )

    def finish(self, table: bytes) -> None:
        self._bytes(bytes(-self._at % _ALIGNMENT))
        data_checksum = self._hash.intdigest()
        self._file.write(table)
        self._file.seek(0)
        checksums = (xxhash.xxh3_64_intdigest(table), data_checksum)
        self._file.write(_HEADER.pack(MAGIC, _FORMAT, 0, self._at, len(table), *checksums))

    def _array(self, array: npt.NDArray[Any]) -> int:
        self._bytes(bytes(-self._at % _ALIGNMENT))
        at = self._at
        self._bytes(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).data.cast("B"))
        return at

    def _bytes(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._at += len(data)


def _read_table(mapped: mmap.mmap, path: Path) -> tuple[ChangeTable, int]:
    if len(mapped) < _DATA_AT:
        raise CorruptUpdateError(f"{path} has {len(mapped)} bytes; a change file has at least {_DATA_AT}.")
    magic, number, _, table_at, table_bytes, table_checksum, data_checksum = _HEADER.unpack_from(mapped)
    if magic != MAGIC or number != _FORMAT:
        raise CorruptUpdateError(f"{path} is no change file of format {_FORMAT}.")
    if table_at < _DATA_AT or table_at + table_bytes != len(mapped):
        raise CorruptUpdateError(f"{path} has {len(mapped)} bytes; its header announces {table_at + table_bytes}.")
    with memoryview(mapped) as view, view[table_at:] as table, view[_DATA_AT:table_at] as data:
        if xxhash.xxh3_64_intdigest(table) != table_checksum or xxhash.xxh3_64_intdigest(data) != data_checksum:
            raise CorruptUpdateError(f"The change file {path} is damaged.")
        try:
            return msgspec.msgpack.decode(table, type=ChangeTable), table_at
        except msgspec.MsgspecError as error:
            raise CorruptUpdateError(f"The table of {path} cannot be read: {error}.") from error


def _read_entry(mapped: mmap.mmap, entry: ChangeEntry, end: int, path: Path) -> WeightChange:
    if entry.position_bytes not in (0, 4, 8) or entry.value_bytes not in (2, 4) or entry.count < 0:
        raise CorruptUpdateError(f"The table of {path} describes {entry.name!r} with impossible widths.")

    def take(width: int, at: int, kind: str) -> npt.NDArray[Any]:
        if at < _DATA_AT or at + width * entry.count > end:
            raise CorruptUpdateError(f"{path} ends before the change of {entry.name!r} does.")
        return np.frombuffer(mapped, f"<{kind}{width}", entry.count, at)

    positions = take(entry.position_bytes, entry.positions_at, "i") if entry.position_bytes else None
    values = take(entry.value_bytes, entry.values_at, "u")
    return WeightChange(name=entry.name, values=values, positions=positions, start=entry.start)
