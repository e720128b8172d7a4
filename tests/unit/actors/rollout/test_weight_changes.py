"""A change file carries positions and bits unharmed; a damaged one is refused before anything is read past its end."""

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.actors.rollout.weight_changes import ChangeFile, WeightChange, check_change, read_changes, write_changes
from headrace.engine.errors import CorruptUpdateError, InputError


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


def test_nothing_changed_is_an_empty_file(tmp_path: Path) -> None:
    assert read_changes(write_changes(tmp_path / "none", [])) == ()


def test_a_file_that_is_short_or_gone_is_refused(tmp_path: Path) -> None:
    file = write_changes(tmp_path / "delta", changes())
    os.truncate(file.path, 40)
    with pytest.raises(CorruptUpdateError, match="ends before the change of 'b' does"):
        read_changes(file)
    with pytest.raises(CorruptUpdateError, match="cannot be mapped"):
        read_changes(msgspec.structs.replace(file, path=str(tmp_path / "absent")))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("count", -1, "impossible widths"),
        ("position_bytes", 3, "impossible widths"),
        ("value_bytes", 8, "impossible widths"),
        ("values_at", -16, "ends before"),
        ("positions_at", 1 << 40, "ends before"),
        ("count", 1 << 60, "ends before"),
    ],
)
def test_a_table_that_lies_is_refused(tmp_path: Path, field: str, value: int, reason: str) -> None:
    file = write_changes(tmp_path / "delta", changes())
    entries = (msgspec.structs.replace(file.entries[0], **{field: value}),)
    with pytest.raises(CorruptUpdateError, match=reason):
        read_changes(msgspec.structs.replace(file, entries=entries))


def test_arrays_of_other_kinds_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give their bits"):
        write_changes(tmp_path / "x", [WeightChange(name="a", values=np.zeros(2, np.float32))])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="give int32 or int64"):
        bad = np.zeros(2, np.uint16)
        write_changes(tmp_path / "x", [WeightChange(name="a", positions=bad, values=bad)])  # type: ignore[arg-type]


def test_an_empty_change_fits_every_tensor() -> None:
    check_change(changes()[3], 0)
