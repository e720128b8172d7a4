"""The folder for weights in shared memory, and what dead runs left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.engine.errors import StorageError
from headrace.engine.hub.payloads import PayloadFolder, remove_left_over
from headrace.engine.types import PolicyVersion, TensorSpec, WeightUpdate
from headrace.engine.weights.keyframe import KeyframeWriter
from headrace.engine.weights.payload import verify_payload

HOLDER = """
import sys, time
from pathlib import Path
from headrace.engine.hub.payloads import PayloadFolder
folder = PayloadFolder("theirs", Path(sys.argv[1]))
(folder.path / "v0-1.bin").write_bytes(b"weights")
print("made", flush=True)
time.sleep(600)
"""


def test_shm_attach_exit(tmp_path: Path) -> None:
    """K-008: after a SIGKILL the next run removes what the dead one left, and nothing of a live one."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert remove_left_over(tmp_path) == []
        ours = PayloadFolder("ours", tmp_path)
        theirs = tmp_path / "headrace-weights-theirs"
        assert (theirs / "v0-1.bin").read_bytes() == b"weights"
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close() if holder.stdout else None
    assert remove_left_over(tmp_path) == [theirs]
    assert ours.path.exists()
    ours.close()
    ours.close()
    assert list(tmp_path.iterdir()) == []


READER = """
import sys
from headrace.engine.types import WeightUpdate
from headrace.engine.weights.payload import open_payload
import msgspec
views = open_payload(msgspec.json.decode(sys.stdin.buffer.read(), type=WeightUpdate))
print(views["w"][1].view("float32").sum())
"""


def test_shm_attach_exit_a_reader_that_ends_leaves_the_weights_to_others(tmp_path: Path) -> None:
    """K-008: B attaches, reads and exits; then A and C still read."""
    ours = PayloadFolder("ours", tmp_path)
    spec = TensorSpec(name="w", dtype="float32", shape=(4,))
    with KeyframeWriter(ours.path / "v0-1.bin", [spec], run_id="r", version=PolicyVersion(0, 1)) as writer:
        writer.write(0, 0, np.arange(4, dtype=np.float32))
        update = WeightUpdate(manifest=writer.manifest(), local_path=str(ours.path / "v0-1.bin"))
    for _ in range(2):
        given = {"input": msgspec.json.encode(update), "capture_output": True}
        reader = subprocess.run([sys.executable, "-c", READER], check=True, **given)
        assert (float(reader.stdout), reader.stderr) == (6.0, b""), "nothing is said of leaked objects"
    verify_payload(update)
    ours.close()


def test_the_folder_is_private(tmp_path: Path) -> None:
    folder = PayloadFolder("run", tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="headrace-weights-run"):
        PayloadFolder("run", tmp_path / "missing")
    assert os.listdir(tmp_path) == []
