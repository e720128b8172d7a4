"""Some samples of each step, for people to read."""

from pathlib import Path
from typing import Literal

import msgspec

from headrace.engine.clock import Clock
from headrace.engine.telemetry.line_file import LineFile

MAX_TEXT_CHARS = 16_384
Kind = Literal["train", "eval"]


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sample as it stands in samples.jsonl.

    Attributes:
        step: The step that trained on it, or after which it was evaluated.
        kind: "train" or "eval".
        prompt, response: Texts; cut at `MAX_TEXT_CHARS` with a note of how much is missing.
        reward: None when the sample got no value.
        lag: Policy versions between its oldest token and the step; None for an evaluation.
        num_tokens: Response tokens.
        finish_reason: "stop", "length" or "aborted".
        time: Unix time of writing; filled in by the writer.
    """

    step: int
    record_id: str
    prompt: str
    response: str
    kind: Kind = "train"
    reward: float | None = None
    lag: int | None = None
    num_tokens: int = 0
    finish_reason: str = ""
    time: float = 0.0


class SampleWriter:
    """Appends to samples.jsonl, at most so many samples a step and kind."""

    def __init__(self, path: Path, clock: Clock, *, max_per_step: int = 8) -> None:
        """Open `path`; 0 for `max_per_step` writes none.

        Raises:
            StorageError: The file cannot be opened.
        """
        self._file = LineFile(path)
        self._clock = clock
        self._max_per_step = max_per_step
        self._step = -1
        self._written: dict[Kind, int] = {"train": 0, "eval": 0}

    def write(self, row: SampleRow) -> bool:
        """Append the sample unless its step has enough; returns whether it was written.

        Raises:
            StorageError: The disk is full or not writable; no part of the line is left behind.
        """
        if row.step != self._step:
            self._step = row.step
            self._written = {"train": 0, "eval": 0}
        if self._written[row.kind] >= self._max_per_step:
            return False
        self._written[row.kind] += 1
        short = msgspec.structs.replace(
            row, time=self._clock.wall(), prompt=_shortened(row.prompt), response=_shortened(row.response)
        )
        self._file.append(msgspec.json.encode(short))
        return True

    def close(self) -> None:
        """May be called twice."""
        self._file.close()


def _shortened(text: str) -> str:
    # A lone surrogate has no UTF-8 form; it becomes a question mark instead of an error.
    text = text.encode("utf-8", "replace").decode("utf-8")
    missing = len(text) - MAX_TEXT_CHARS
    if missing <= 0:
        return text
    return f"{text[:MAX_TEXT_CHARS]} [{missing} characters more]"
