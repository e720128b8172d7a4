"""The names of `headrace.engine.weights.changes` that the scatter uses."""

from headrace.engine.weights.changes import (
    ChangeFile,
    PositionArray,
    ValueArray,
    WeightChange,
    check_change,
    read_changes,
    write_changes,
)

__all__ = [
    "ChangeFile",
    "PositionArray",
    "ValueArray",
    "WeightChange",
    "check_change",
    "read_changes",
    "write_changes",
]
