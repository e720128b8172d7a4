"""One row of figures a step: gathered in parts, reduced once, written as a line of metrics.jsonl."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from headrace.engine.clock import Clock
from headrace.engine.errors import SchemaError
from headrace.engine.telemetry.line_file import LineFile
from headrace.engine.telemetry.metric_keys import MetricKey, Reduction, declared

_RESERVED = ("step", "time")


class _Part(msgspec.Struct):
    """What has been added to one key: enough for every reduction, whatever the number of parts."""

    reduction: Reduction
    total: float = 0.0
    weight: float = 0.0
    value: float = math.nan  # the largest, smallest or last one

    def add(self, value: float, weight: float) -> None:
        if self.reduction in ("mean", "sum"):
            self.total += value * weight
            self.weight += weight
        elif self.reduction == "last" or math.isnan(self.value):
            self.value = value
        elif not math.isnan(value):
            self.value = max(self.value, value) if self.reduction == "max" else min(self.value, value)

    def result(self) -> float:
        if self.reduction == "sum":
            return self.total
        if self.reduction == "mean":
            return self.total / self.weight if self.weight else math.nan
        return self.value


class MetricAccumulator:
    """Adds up the parts of a step.

    A mean is over items, not over calls: three batches of 4, 4 and 2 items, each added with its mean and its size, give
    the mean over the ten. Memory does not grow with the number of parts.
    """

    def __init__(self, declare: Iterable[MetricKey] = ()) -> None:
        """`declare` adds keys to those of `metric_keys`, or overrules them."""
        self._declare = tuple(declare)
        self._known: dict[str, Reduction] = {}
        self._parts: dict[str, _Part] = {}

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add one part. `weight` is how many items it stands for; for "sum" it multiplies, for the others it is unused.

        A part of weight 0 changes nothing, even if its value is not finite; a key with no other part stays absent.

        Raises:
            SchemaError: The key is not declared.
        """
        reduction = self._known.get(name)
        if reduction is None:
            reduction = self._known[name] = declared(name, self._declare).reduction
        if weight == 0:
            return
        if name not in self._parts:
            self._parts[name] = _Part(reduction)
        self._parts[name].add(float(value), weight)

    def add_all(self, values: Mapping[str, float], weight: float = 1.0) -> None:
        """Add one part to each key.

        Raises:
            SchemaError: A key is not declared.
        """
        for name, value in values.items():
            self.add(name, value, weight)

    def take(self) -> dict[str, float]:
        """The reduced figures of all keys that got a part, in the order of their first part; then start anew."""
        out = {name: part.result() for name, part in self._parts.items()}
        self._parts.clear()
        return out


class MetricsWriter:
    """Appends rows to metrics.jsonl: {"step": .., "time": .., key: number or null}.

    A training step has one row. An evaluation has a row of its own, with the number of steps finished before it.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        """Open `path` for appending.

        Raises:
            StorageError: The file cannot be opened.
        """
        self._file = LineFile(path)
        self._clock = clock

    def write(self, step: int, values: Mapping[str, float | None]) -> dict[str, float | None]:
        """Append one row and hand it to the system at once; returns the figures as written.

        What is not finite is written as null.

        Raises:
            SchemaError: A key is called "step" or "time".
            StorageError: The disk is full or not writable; no part of the row is left behind.
        """
        for name in _RESERVED:
            if name in values:
                raise SchemaError(f"a metric may not be called {name!r}, which every row has: rename the metric")
        clean = {name: _finite(value) for name, value in values.items()}
        self._file.append(msgspec.json.encode({"step": step, "time": round(self._clock.wall(), 3), **clean}))
        return clean

    def close(self) -> None:
        """May be called twice."""
        self._file.close()


def _finite(value: float | None) -> float | None:
    # numpy and torch scalars come in here too, and JSON knows neither them nor NaN.
    if value is None:
        return None
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None
