"""The bytes of format 1 never change: files that an earlier build wrote are read, and written again byte for byte."""

from pathlib import Path

import numpy as np
import pytest

from headrace.engine.records import decode_column, decode_trajectory, encode_column, encode_trajectory
from headrace.engine.testing.samples import assert_same_trajectory, make_trajectory
from headrace.engine.types import FinishReason, PolicyVersion, Trajectory, VersionSpan

_FOLDER = Path(__file__).parents[3] / "golden" / "records"


def _trajectory(name: str) -> Trajectory:
    if name == "plain":
        return make_trajectory()
    if name == "empty-response":
        spans = (VersionSpan(PolicyVersion(2, 9), 0),)
        return make_trajectory(0, 0, spans=spans, finish_reason=FinishReason.ABORTED, data={}, prompt_text="")
    assert name == "two-versions"
    spans = (VersionSpan(PolicyVersion(0, 7), 6), VersionSpan(PolicyVersion(1, 300), 3))
    return make_trajectory(num_response=9, spans=spans, finish_reason=FinishReason.LENGTH, attempt=70_000)


def _bytes(name: str) -> bytes:
    return bytes.fromhex((_FOLDER / f"{name}.hex").read_text())


@pytest.mark.parametrize("name", ["plain", "empty-response", "two-versions"])
def test_golden_trajectories_are_read_and_written_byte_for_byte(name: str) -> None:
    assert encode_trajectory(_trajectory(name)).hex(" ", 8) == _bytes(name).hex(" ", 8)
    assert_same_trajectory(decode_trajectory(_bytes(name)), _trajectory(name))


def test_golden_columns_are_read_and_written_byte_for_byte() -> None:
    for file, column, array in (
        ("column-reward", "reward", np.array(-0.125)),
        ("column-values", "values", np.array([0.5, -1.0, 2.0], np.float32)),
    ):
        assert encode_column(column, array).hex(" ", 8) == _bytes(file).hex(" ", 8)
        name, decoded = decode_column(_bytes(file))
        assert name == column
        np.testing.assert_array_equal(decoded, array)
