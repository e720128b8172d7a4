"""Rows of a JSON Lines file: one object a line, UTF-8, empty lines ignored."""

from pathlib import Path
from typing import Any

import msgspec

from headrace.engine.errors import ConfigError


class JsonlRows:
    """Holds the lines in memory and decodes them when they are asked for; each is checked once, at the start."""

    def __init__(self, path: Path | str, prompt_key: str) -> None:
        """Read and check the whole file; blocks for as long as that takes.

        Raises:
            ConfigError: There is no such file, a line is not a JSON object or lacks `prompt_key`, or all are empty.
        """
        self._path = Path(path)
        self._decoder = msgspec.json.Decoder(dict[str, Any])
        self._lines: list[tuple[int, bytes]] = []
        try:
            content = self._path.read_bytes()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"the prompt file {str(path)!r} cannot be read ({reason}); correct the path") from error
        for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
            if line.strip():
                self._check(number, line, prompt_key)
                self._lines.append((number, line))
        if not self._lines:
            raise ConfigError(f"the prompt file {str(path)!r} has no rows; give at least one JSON object a line")

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, index: int) -> dict[str, Any]:
        return self._decoder.decode(self._lines[index][1])

    def where(self, index: int) -> str:
        return f"{self._path.name} line {self._lines[index][0]}"

    def _check(self, number: int, line: bytes, prompt_key: str) -> None:
        where = f"{self._path} line {number}"
        try:
            row = self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{where} is not a JSON object: {error}") from error
        if prompt_key not in row:
            keys = ", ".join(sorted(row)) or "none"
            raise ConfigError(
                f"{where} has no key {prompt_key!r}; its keys are: {keys}; set data.prompt_key to one of them"
            )
