"""`headrace bench`: figures of this installation on this machine.

A benchmark is a function without arguments that returns its figures, one file each below `benchmarks/`, and one line in
`BENCHMARKS`; it is imported only when it runs. Names of figures end in their unit.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from headrace.engine.errors import RunError, UsageError
from headrace.engine.plugins import load_object

Figures = Mapping[str, "float | Figures"]


class Benchmark(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark: what it measures, and the function as `module:function`."""

    summary: str
    function: str


BENCHMARKS = {
    "records": Benchmark(
        summary="encode and decode a trajectory record of 1,000 tokens",
        function="headrace.clients.cli.benchmarks.records:run",
    ),
    "overlap": Benchmark(
        summary="how well sampling overlaps with training: real engine and buffer, timed actors, staleness 4, 1 and 0",
        function="headrace.clients.cli.benchmarks.overlap:run",
    ),
    "weights": Benchmark(
        summary="incremental weight updates: bytes a changed element, encoding and decoding speed",
        function="headrace.clients.cli.benchmarks.weights:run",
    ),
    "learner": Benchmark(
        summary="how full and even a batch is planned; memory and time of log-probabilities without the logits",
        function="headrace.actors.learner.benchmarks:run",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; all of them without a name")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and end")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")


def run(args: argparse.Namespace) -> int:
    """Run the benchmarks one after another; blocks for as long as they take.

    Raises:
        UsageError: A name is unknown, or a module that the benchmark needs is not installed.
        RunError: A benchmark returned something else than figures.
    """
    if args.list:
        listed = {name: benchmark.summary for name, benchmark in BENCHMARKS.items()}
        print(json.dumps(listed) if args.json else "\n".join(f"{name:<12} {text}" for name, text in listed.items()))
        return 0
    names: list[str] = args.names or list(BENCHMARKS)
    for name in names:
        if name not in BENCHMARKS:
            raise UsageError(f"there is no benchmark {name}; there are: {', '.join(BENCHMARKS)}")
    results: dict[str, Figures] = {}
    for name in names:
        print(f"{name}: {BENCHMARKS[name].summary} ...", file=sys.stderr, flush=True)
        results[name] = _measure(name)
    print(json.dumps(results, allow_nan=False) if args.json else _table(results))
    return 0


def _measure(name: str) -> Figures:
    function = cast(Callable[[], object], load_object(BENCHMARKS[name].function))
    figures = function()
    if not isinstance(figures, Mapping):
        raise RunError(f"benchmark {name} returned {type(figures).__name__}; a mapping of figures is needed")
    return cast(Figures, figures)


def _table(results: Mapping[str, Figures]) -> str:
    rows = [(name, *row) for name, figures in results.items() for row in _rows("", figures)]
    width = max((len(f"{name} {key}") for name, key, _ in rows), default=0)
    return "\n".join(f"{f'{name} {key}':<{width}}  {value:>14,.6g}" for name, key, value in rows)


def _rows(prefix: str, figures: Figures) -> list[tuple[str, float]]:
    rows: list[tuple[str, float]] = []
    for key, value in figures.items():
        if isinstance(value, Mapping):
            rows += _rows(f"{prefix}{key}.", value)
        else:
            rows.append((f"{prefix}{key}", value))
    return rows
