"""`headrace config`."""

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


def test_the_schema_can_be_saved_as_a_file_to_start_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert read_config(None, text=capsys.readouterr().out) == Config()
