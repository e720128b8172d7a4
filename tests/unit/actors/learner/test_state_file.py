import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.actors.learner.state_file import read_state_files, write_state_file
from headrace.engine.errors import FormatError


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape)


def forge(path: Path, parts: dict[str, tuple[int, torch.Tensor, list[int]]], **changes: Any) -> Path:
    """A file as some rank would have written it: for each tensor its first element, its part and the whole's shape.

    Further arguments replace fields of the entry "w".
    """
    header: dict[str, Any] = {}
    places: dict[str, Any] = {}
    data = b""
    for name, (start, part, shape) in parts.items():
        raw = part.numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(part.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        places[name] = [start, shape]
        data += raw
    header["w"] |= changes
    header["__metadata__"] = {"headrace.places": json.dumps(places)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_what_is_written_is_read_again_bit_for_bit_and_other_tools_can_read_it(tmp_path: Path) -> None:
    saved = {
        "matrix": numbered(3, 4),
        "scalar": torch.tensor(2.5),
        "half": numbered(5, dtype=torch.bfloat16),
        "none": torch.empty(0, 7),
    }
    write_state_file(tmp_path / "s.safetensors", saved, writes_whole=True)
    read = {name: torch.full_like(value, -1) for name, value in saved.items()}
    read_state_files([tmp_path / "s.safetensors"], read)
    for name, value in saved.items():
        assert torch.equal(read[name], value), name
    others = load_file(tmp_path / "s.safetensors")
    assert torch.equal(others["matrix"], saved["matrix"]) and torch.equal(others["half"], saved["half"])


def test_whole_tensors_are_written_by_one_rank_only(tmp_path: Path) -> None:
    write_state_file(tmp_path / "s", {"w": numbered(4)}, writes_whole=False)
    with pytest.raises(FormatError, match="not in both"):
        read_state_files([tmp_path / "s"], {"w": numbered(4)})


@pytest.mark.parametrize("cuts", [(0, 12), (0, 4, 12), (0, 4, 8, 12), (0, 1, 12)])
def test_parts_of_any_number_of_ranks_are_put_together(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    whole = numbered(12)
    files = [
        forge(tmp_path / str(first), {"w": (first, whole[first:after], [3, 4])}) for first, after in pairwise(cuts)
    ]
    read = torch.full((3, 4), -1.0)
    read_state_files(reversed(files), {"w": read})
    assert torch.equal(read, whole.reshape(3, 4))


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    whole = numbered(12)
    files = [forge(tmp_path / str(first), {"w": (first, whole[first : first + 4], [12])}) for first in (0, 8)]
    with pytest.raises(FormatError, match="lacks elements 4 to 12 of 'w'"):
        read_state_files(files, {"w": torch.zeros(12)})


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"w": torch.zeros(3, 4)}, r"F32 \[12\] in the checkpoint and F32 \[3, 4\] in the model"),
        ({"w": torch.zeros(12, dtype=torch.bfloat16)}, "BF16"),
        ({"w": torch.zeros(12), "v": torch.zeros(1)}, "'v' is in the checkpoint or in the model"),
        ({}, "'w' is in the checkpoint or in the model"),
    ],
)
def test_tensors_of_another_model_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], words: str) -> None:
    file = forge(tmp_path / "s", {"w": (0, numbered(12), [12])})
    with pytest.raises(FormatError, match=words):
        read_state_files([file], tensors)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "F9"},
        {"shape": [13]},
        {"shape": [-12]},
        {"shape": "12"},
        {"data_offsets": [-48, 0]},
        {"data_offsets": [48, 96]},
        {"data_offsets": [0]},
    ],
)
def test_a_header_that_contradicts_its_file_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = forge(tmp_path / "s", {"w": (0, numbered(12), [12])}, **changes)
    with pytest.raises(FormatError, match="is no state file"):
        read_state_files([file], {"w": torch.zeros(12)})


@pytest.mark.parametrize(("start", "shape"), [(-1, [12]), (1, [12]), (0, [11]), (0, [-1, 12])])
def test_a_place_outside_its_tensor_is_refused(tmp_path: Path, start: int, shape: list[int]) -> None:
    file = forge(tmp_path / "s", {"w": (start, numbered(12), shape)})
    with pytest.raises(FormatError):
        read_state_files([file], {"w": torch.zeros(12)})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        (1 << 40).to_bytes(8, "little"),
        (3).to_bytes(8, "little") + b"{}x",
        (2).to_bytes(8, "little") + b"{}",
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s").write_bytes(content)
    with pytest.raises(FormatError, match="is no state file"):
        read_state_files([tmp_path / "s"], {"w": torch.zeros(12)})


# Peaks in KiB: with the tensors in memory, after writing them, after reading them.
_MEASURE = """
import resource, sys, torch
from pathlib import Path
from headrace.actors.learner.state_file import read_state_files, write_state_file

tensors = {str(n): torch.ones(4 << 20) for n in range(8)}
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
file = Path(sys.argv[1])
print(peak())
write_state_file(file, tensors, writes_whole=True)
print(peak())
read_state_files([file], tensors)
print(peak())
"""


def test_saving_and_loading_take_no_second_copy_in_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path / "s")], capture_output=True, text=True, check=True, timeout=120
    )
    before, written, read = (int(line) << 10 for line in done.stdout.split())
    assert (tmp_path / "s").stat().st_size > 128 << 20
    assert read - before < 8 << 20, (before, written, read)
