"""A change file carries positions and bits unharmed; a damaged one is refused before anything is read past its end."""

import os
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import CorruptUpdateError, InputError, StorageError
from headrace.engine.types import PolicyVersion
from headrace.engine.weights.changes import (
    ChangeFile,
    WeightChange,
    check_change,
    read_change_file,
    read_changes,
    write_changes,
)


def changes() -> list[WeightChange]:
    return [
        WeightChange(name="a", positions=np.array([1, 5, 9], np.int32), values=np.array([1, 2, 0xFFFF], np.uint16)),
        WeightChange(name="b", start=7, values=np.arange(5, dtype=np.uint32)),
        WeightChange(name="c", positions=np.array([2**40], np.int64), values=np.array([7], np.uint32)),
        WeightChange(name="d", positions=np.empty(0, np.int32), values=np.empty(0, np.uint16)),
    ]


def test_what_is_written_is_read_and_outlives_the_file(tmp_path: Path) -> None:
    message = msgspec.msgpack.encode(write_changes(tmp_path / "delta", changes(), digest=2**64 - 1))
    assert len(message) < 200 + len(str(tmp_path))
    file = msgspec.msgpack.decode(message, type=ChangeFile)
    found = read_changes(file)
    os.unlink(file.path)
    assert file.digest == 2**64 - 1
    for change, expected in zip(found, changes(), strict=True):
        assert (change.name, change.start) == (expected.name, expected.start)
        np.testing.assert_array_equal(change.values, expected.values)
        assert change.values.dtype == expected.values.dtype
        assert (change.positions is None) == (expected.positions is None)
        if change.positions is not None:
            np.testing.assert_array_equal(change.positions, expected.positions)
            assert not change.positions.flags.writeable


def test_a_file_says_what_it_is_for(tmp_path: Path) -> None:
    base, version = PolicyVersion(1, 3), PolicyVersion(1, 9)
    write_changes(tmp_path / "delta", changes(), digest=5, run_id="run", base=base, version=version)
    table, found = read_change_file(tmp_path / "delta")
    assert (table.run_id, table.base, table.version, table.digest) == ("run", base, version, 5)
    assert [change.name for change in found] == ["a", "b", "c", "d"]


def test_nothing_changed_is_a_file_without_entries(tmp_path: Path) -> None:
    assert read_changes(write_changes(tmp_path / "none", [])) == ()


def test_a_file_for_another_state_than_the_one_announced_is_refused(tmp_path: Path) -> None:
    file = write_changes(tmp_path / "delta", changes(), digest=1)
    with pytest.raises(CorruptUpdateError, match="not 0000000000000002"):
        read_changes(msgspec.structs.replace(file, digest=2))


@given(cut=st.integers(0, 1 << 12), flip=st.integers(0, 1 << 12), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_a_file_that_is_cut_short_or_damaged_anywhere_is_refused(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("changes") / "delta"
    file = write_changes(path, changes())
    whole = path.read_bytes()
    path.write_bytes(whole[: cut % len(whole)])
    with pytest.raises(CorruptUpdateError):
        read_changes(file)
    damaged = bytearray(whole)
    damaged[flip % len(whole)] ^= 1 << bit
    path.write_bytes(damaged)
    if flip % len(whole) in range(12, 16) or flip % len(whole) in range(48, 64):
        return  # header bytes that mean nothing
    with pytest.raises(CorruptUpdateError):
        read_changes(file)


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptUpdateError, match="cannot be mapped"):
        read_changes(ChangeFile(path=str(tmp_path / "absent"), digest=0))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("count", -1, "impossible widths"),
        ("position_bytes", 3, "impossible widths"),
        ("value_bytes", 8, "impossible widths"),
        ("values_at", -16, "ends before"),
        ("values_at", 0, "ends before"),
        ("positions_at", 1 << 40, "ends before"),
        ("count", 1 << 60, "ends before"),
        ("name", 3, "cannot be read"),
    ],
)
def test_a_table_that_lies_is_refused(tmp_path: Path, field: str, value: int, reason: str) -> None:
    file = write_changes(tmp_path / "delta", changes())
    table, _ = read_change_file(Path(file.path))
    rewrite_table(
        Path(file.path),
        msgspec.structs.replace(table, entries=(msgspec.structs.replace(table.entries[0], **{field: value}),)),
    )
    with pytest.raises(CorruptUpdateError, match=reason):
        read_changes(file)


def rewrite_table(path: Path, table: object) -> None:
    """Put another table into a change file, with a checksum that fits."""
    whole, encoded = path.read_bytes(), msgspec.msgpack.encode(table)
    header = list(struct.unpack_from("<8sIIQQQQ", whole))
    header[4], header[5] = len(encoded), xxhash.xxh3_64_intdigest(encoded)
    path.write_bytes(struct.pack("<8sIIQQQQ", *header) + whole[48 : header[3]] + encoded)


def test_arrays_of_other_kinds_are_not_written_and_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give their bits"):
        write_changes(tmp_path / "x", [WeightChange(name="a", values=np.zeros(2, np.float32))])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="give int32 or int64"):
        bad = np.zeros(2, np.uint16)
        write_changes(tmp_path / "x", [WeightChange(name="a", positions=bad, values=bad)])  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        write_changes(tmp_path / "absent" / "x", changes())


def test_an_empty_change_fits_every_tensor() -> None:
    check_change(changes()[3], 0)
