"""`headrace weights` tells what is in a file and what differs, and refuses what it does not know in one sentence."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from headrace.clients.cli.main import main
from headrace.engine.types import PolicyVersion
from headrace.engine.weights.changes import WeightChange, write_changes

Tensors = dict[str, npt.NDArray[np.uint16] | npt.NDArray[np.uint32]]


def save(path: Path, tensors: Tensors) -> Path:
    """A safetensors file of bfloat16 and float32 bits."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, bits in tensors.items():
        kind = "BF16" if bits.itemsize == 2 else "F32"
        header[name] = {"dtype": kind, "shape": bits.shape, "data_offsets": [len(data), len(data) + bits.nbytes]}
        data += bits.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def tensors() -> Tensors:
    return {"a": np.arange(0x3F80, 0x3F80 + 12, dtype=np.uint16).reshape(3, 4), "b": np.ones(5, np.uint32)}


def change_file(path: Path) -> Path:
    a = WeightChange(name="a", positions=np.array([2, 7], np.int32), values=np.array([1, 2], np.uint16))
    b = WeightChange(name="b", start=1, values=np.ones(3, np.uint32))
    write_changes(path, [a, b], digest=5, run_id="run", base=PolicyVersion(0, 3), version=PolicyVersion(0, 6))
    return path


def test_a_checkpoint_and_a_change_file_are_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "model.safetensors", tensors())
    assert main(["weights", "inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "a  bfloat16  3x4  24 bytes" in out and "2 tensors, 17 elements, 44 bytes" in out
    assert main(["weights", "inspect", str(change_file(tmp_path / "change"))]) == 0
    out = capsys.readouterr().out
    assert "a  2 elements at positions" in out and "b  3 elements from 1 on" in out
    assert "from version 3 to 6: 5 elements of 2 tensors" in out and "digest 0000000000000005" in out


def test_two_checkpoints_are_compared_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = save(tmp_path / "one.safetensors", tensors())
    assert main(["weights", "diff", str(one), str(one)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    other = tensors()
    other["a"][1, 1] += np.uint16(3)
    other["c"] = other.pop("b")
    two = save(tmp_path / "two.safetensors", other)
    assert main(["weights", "diff", str(one), str(two)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == [f"b  only in {one}", f"c  only in {two}"]
    assert out[2:] == ["a  1 of 12 elements differ, by 3 ulp at most", "1 of 17 elements differ (5.882%)"]


def test_a_change_file_is_compared_with_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = change_file(tmp_path / "change")
    state = tensors()
    assert main(["weights", "diff", str(save(tmp_path / "old.safetensors", state)), str(change)]) == 1
    assert "a  2 of 2 changes are not there" in capsys.readouterr().out
    state["a"].reshape(-1)[[2, 7]] = [1, 2]
    assert main(["weights", "diff", str(save(tmp_path / "new.safetensors", state)), str(change)]) == 0


def test_verify_finds_damage_and_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = change_file(tmp_path / "change")
    assert main(["weights", "verify", str(change)]) == 0
    small = save(tmp_path / "small.safetensors", {"a": np.zeros(7, np.uint16), "b": np.zeros(5, np.uint32)})
    assert main(["weights", "verify", str(change), "--against", str(small)]) == 1
    other = save(tmp_path / "other.safetensors", {"a": np.zeros(12, np.uint16)})
    assert main(["weights", "verify", str(change), "--against", str(other)]) == 1
    data = bytearray(change.read_bytes())
    data[70] ^= 1
    change.write_bytes(data)
    assert main(["weights", "verify", str(change)]) == 1
    err = capsys.readouterr().err
    assert "lie in [0, 7)" in err and "does not have" in err and "is damaged" in err


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 40, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{"]
)
def test_what_is_no_weights_file_is_refused(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    assert main(["weights", "inspect", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_tensors_that_lie_outside_their_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "x.safetensors", tensors())
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["weights", "inspect", str(path)]) == 1
    assert "does not fit there" in capsys.readouterr().err


def test_a_path_without_weights_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = change_file(tmp_path / "change")
    for arguments in (
        ["inspect", str(tmp_path / "absent")],
        ["inspect", str(tmp_path)],
        ["diff", str(change), str(change)],
    ):
        assert main(["weights", *arguments]) == 2
    assert "Traceback" not in capsys.readouterr().err
