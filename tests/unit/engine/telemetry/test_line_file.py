import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.engine.errors import StorageError
from headrace.engine.telemetry.line_file import LineFile, cut_lines_from, cut_torn_line, write_whole


def test_lines_are_readable_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = LineFile(path)
    file.append(b"one")
    assert path.read_bytes() == b"one\n"
    file.append(b"two")
    assert path.read_bytes() == b"one\ntwo\n"
    file.close()
    file.close()


def test_a_torn_last_line_is_cut_when_the_file_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "a')
    file = LineFile(path)
    file.append(b'{"step": 2}')
    file.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_torn_line_longer_than_one_block_is_cut_wholly(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"whole\n" + b"x" * 200_000)
    assert cut_torn_line(path) == 200_000
    assert path.read_bytes() == b"whole\n"
    path.write_bytes(b"x" * 200_000)
    assert cut_torn_line(path) == 200_000
    assert path.read_bytes() == b""
    assert cut_torn_line(tmp_path / "missing") == 0


def test_lines_are_cut_from_the_first_that_is_late(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"1\n2\n3\n4\n")
    assert cut_lines_from(path, lambda line: int(line) >= 3) == 2
    assert path.read_bytes() == b"1\n2\n"
    assert cut_lines_from(path, lambda line: False) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the always-full device of Linux")
def test_a_full_disk_is_an_error_that_names_the_path(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.symlink_to("/dev/full")
    file = LineFile(path)
    with pytest.raises(StorageError, match=r"the disk of .*rows\.jsonl is full"):
        file.append(b"one")
    file.close()


FILL = """
import resource, sys
from pathlib import Path
from headrace.engine.errors import StorageError
from headrace.engine.telemetry.line_file import LineFile

resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
file = LineFile(Path(sys.argv[1]))
try:
    while True:
        file.append(b"x" * 29)
except StorageError as error:
    print(error)
"""


def test_a_write_that_the_disk_takes_only_half_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    done = subprocess.run([sys.executable, "-c", FILL, str(path)], capture_output=True, text=True, check=True)
    assert "is full" in done.stdout
    assert path.read_bytes() == (b"x" * 29 + b"\n") * 3


def test_a_file_is_replaced_wholly_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["config.toml"]
    with pytest.raises(StorageError, match="cannot be written"):
        write_whole(tmp_path / "missing" / "config.toml", b"new")
