"""`headrace config`."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from headrace.clients.cli.main import main
from headrace.engine.config import Config, load_config, read_config

GOOD = '[model]\npath = "m"\n[reward]\nfunction = "rewards:score"\n'


def test_show_prints_the_effective_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(GOOD)
    assert main(["config", "show", "--run.steps=7", str(file), "--run.name=x"]) == 0
    shown = load_config(None, text=capsys.readouterr().out)
    assert (shown.run.steps, shown.run.name, shown.model.path) == (7, "x", "m")


def test_show_works_on_an_unfinished_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show"]) == 0
    assert read_config(None, text=capsys.readouterr().out) == Config()


def test_check_says_ok_or_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(GOOD)
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: ok\n"
    assert main(["config", "check", str(file), "--schedule.group_size=1"]) == 2
    assert "schedule.group_size = 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("--algorithm.name=gropo", 'error: "gropo" is not registered in headrace.algorithms'),
        ("--algorithm.name=ppo", "needs values, which no part of a run produces yet: choose another method"),
        ("--algorithm.name=dpo", "trains on preference pairs, and a run trains on what it samples"),
        ("--algorithm.beta=0.5", "algorithm.beta = 0.5 has no effect"),
        ("--algorithm.kl.estimator=k1", 'algorithm.kl.estimator = "k1" has no effect as a loss'),
    ],
)
def test_check_refuses_a_method_that_a_run_would_refuse(
    override: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(GOOD)
    assert main(["config", "check", str(file), override]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_every_method_is_accepted_by_check_or_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(GOOD)
    refused: dict[str, str] = {}
    for point in entry_points(group="headrace.algorithms"):
        if main(["config", "check", str(file), f"--algorithm.name={point.name}"]) == 2:
            refused[point.name] = capsys.readouterr().err
    assert {"ppo", "dpo", "sft", "distillation"} == set(refused)
    assert all("choose another method" in text and "docs/algorithms.md" in text for text in refused.values())


def test_the_schema_can_be_saved_as_a_file_to_start_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert read_config(None, text=capsys.readouterr().out) == Config()
