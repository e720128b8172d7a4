"""Which columns a table knows: name, dtype and shape of each."""

from typing import Any, Literal

import msgspec
import numpy.typing as npt

from headrace.engine.errors import SchemaError
from headrace.engine.records.frame import DTYPES

ColumnDtype = Literal["int32", "int64", "uint8", "float32", "float64"]


class ColumnSpec(msgspec.Struct, frozen=True):
    """One sidecar column. A "scalar" has shape [], "tokens" has shape [T], one value a response token."""

    name: str
    dtype: ColumnDtype
    shape: Literal["scalar", "tokens"]


class TableSchema(msgspec.Struct, frozen=True):
    """The sidecar columns that a table accepts. A stage adds its own with `extended`."""

    columns: tuple[ColumnSpec, ...]

    def spec(self, name: str) -> ColumnSpec:
        """The declaration of a column.

        Raises:
            SchemaError: The table has no such column.
        """
        for column in self.columns:
            if column.name == name:
                return column
        known = ", ".join(column.name for column in self.columns)
        raise SchemaError(f"column {name[:80]!r} is unknown; the table has {known}; declare it in the table's schema")

    def check(self, name: str, array: npt.NDArray[Any], num_response_tokens: int) -> None:
        """Refuse an array that is not what the column declares; T is the record's `num_response_tokens`.

        Raises:
            SchemaError: The column is unknown, or the array's dtype or shape is another one.
        """
        spec = self.spec(name)
        if array.dtype != DTYPES[spec.dtype]:
            raise SchemaError(f"column {name!r} has dtype {array.dtype}; it must be {spec.dtype}; convert it first")
        shape = () if spec.shape == "scalar" else (num_response_tokens,)
        if array.shape != shape:
            raise SchemaError(f"column {name!r} has shape {list(array.shape)}; it must be {list(shape)} ({spec.shape})")

    def extended(self, *columns: ColumnSpec) -> "TableSchema":
        """This schema with more columns.

        Raises:
            SchemaError: A name is declared twice with different types.
        """
        merged = {column.name: column for column in self.columns}
        for column in columns:
            if merged.setdefault(column.name, column) != column:
                raise SchemaError(f"column {column.name!r} is already declared as {merged[column.name]}; rename it")
        return TableSchema(tuple(merged.values()))


DEFAULT_SCHEMA = TableSchema(
    (
        ColumnSpec("reward", "float64", "scalar"),
        ColumnSpec("advantage", "float32", "scalar"),
        ColumnSpec("reference_logprobs", "float32", "tokens"),
        ColumnSpec("proximal_logprobs", "float32", "tokens"),
        ColumnSpec("values", "float32", "tokens"),
    )
)
