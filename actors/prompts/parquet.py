"""Rows of a Parquet file. Needs pyarrow."""

from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.engine.errors import ConfigError


class ParquetRows:
    """Holds the table in memory, in Arrow's own layout."""

    def __init__(self, path: Path | str) -> None:
        """Read the whole file; blocks for as long as that takes.

        Raises:
            ConfigError: pyarrow is not installed, or the file is missing, not Parquet or without rows.
        """
        try:
            pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError(
                'data.source = "parquet" needs the package pyarrow; pip install pyarrow adds it'
            ) from error
        self._path = Path(path)
        try:
            self._table: Any = parquet.read_table(self._path)
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(f"the prompt file {str(path)!r} cannot be read as Parquet: {error}") from error
        if self._table.num_rows == 0:
            raise ConfigError(f"the prompt file {str(path)!r} has no rows; give at least one")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> dict[str, Any]:
        rows: list[dict[str, Any]] = self._table.slice(index, 1).to_pylist()
        return rows[0]

    def where(self, index: int) -> str:
        return f"{self._path.name} row {index}"
