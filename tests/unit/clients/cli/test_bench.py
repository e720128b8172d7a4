"""`headrace bench`: the table, its names and its two forms of output."""

import json
import math

import pytest

from headrace.clients.cli.bench import BENCHMARKS
from headrace.clients.cli.main import main
from headrace.engine.plugins import load_object


def test_every_entry_of_the_table_leads_to_a_function() -> None:
    assert all(callable(load_object(benchmark.function)) for benchmark in BENCHMARKS.values())


def test_list_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BENCHMARKS)


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "recrods"]) == 2
    assert "there is no benchmark recrods; there are: records" in capsys.readouterr().err


def test_json_is_one_object_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "records", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["records"]
    assert figures["encode_us"] > 0 and all(math.isfinite(value) for value in figures.values())


def test_without_json_a_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "records"]) == 0
    assert "records encode_us" in capsys.readouterr().out
