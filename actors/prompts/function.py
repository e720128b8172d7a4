"""Rows that a function of the user returns."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import msgspec

from headrace.engine.errors import ConfigError, UsageError
from headrace.engine.plugins import load_object


class FunctionRows:
    """What `module:function` gave when it was called once: a sequence, or the first `size` of an iterable."""

    def __init__(self, spec: str, options: Mapping[str, Any], size: int, prompt_key: str) -> None:
        """Call the function with the options as keywords; blocks for as long as it takes.

        Args:
            spec: `module:function`; it returns questions (text) or rows (dicts with `prompt_key`).
            options: Keywords.
            size: Most rows that are taken of an iterable that is not a sequence.
            prompt_key: Under which a bare question is put.

        Raises:
            ConfigError: The function cannot be loaded or called, or returned something else or nothing.
        """
        try:
            function = load_object(spec)
        except UsageError as error:
            raise ConfigError(f"data.path of a function source cannot be used: {error}") from error
        if not callable(function):
            raise ConfigError(f"data.path {spec!r} is a {type(function).__name__}; give a function that returns rows")
        try:
            given: object = function(**options)
        except TypeError as error:
            raise ConfigError(
                f"data.path {spec!r} cannot be called with data.options {dict(options)}: {error}"
            ) from error
        kind = type(given).__name__
        if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
            raise ConfigError(f"data.path {spec!r} returned a {kind}; it must return a sequence of rows")
        rows = cast(Iterable[object], given)
        self._rows: Sequence[object] = rows if isinstance(rows, Sequence) else list(islice(rows, size))
        self._spec = spec
        self._prompt_key = prompt_key
        if not self._rows:
            raise ConfigError(f"data.path {spec!r} returned no rows; it must return at least one")

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        if isinstance(row, str):
            return {self._prompt_key: row}
        try:
            return msgspec.convert(row, type=dict[str, Any])
        except msgspec.ValidationError as error:
            kind = type(row).__name__
            raise ConfigError(f"{self.where(index)} is a {kind}; a row is text or a dict with text as keys") from error

    def where(self, index: int) -> str:
        return f"{self._spec} row {index}"
