"""The command line's frame: exit codes, messages, and what `--debug` adds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.clients.cli.main import COMMANDS, main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out and command.summary in out for name, command in COMMANDS.items())


def test_no_command_prints_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("headrace ")


def test_an_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tarin"]) == 2
    assert "choose from 'train'" in capsys.readouterr().err


def test_a_usage_error_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "--learner.learning_rat=1"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: --learner.learning_rat: section [learner] has no key")
    assert captured.err.endswith("did you mean learner.learning_rate?\n") and captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    "argv", [["--debug", "config", "check"], ["config", "check", "--debug"], ["config", "--debug", "check"]]
)
def test_debug_anywhere_adds_the_traceback(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and "\nerror: model.path is empty" in err


def test_an_option_without_its_section_names_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--learning_rate=1"]) == 2
    assert "there is no option --learning_rate; " in (err := capsys.readouterr().err)
    assert "write learner.learning_rate" in err


def test_a_command_without_configuration_refuses_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list", "--run.steps=1"]) == 2
    assert "unknown argument --run.steps=1" in capsys.readouterr().err


PROGRAM = """
import sys
from headrace.clients.cli import main
main.COMMANDS["made"] = main.Command(module="made_command", summary="made for a test")
sys.exit(main.main(["made"]))
"""


def run_made_command(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """A command of our own, in a process of its own."""
    (folder / "made_command.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=environment, timeout=60
    )


@pytest.mark.parametrize(
    ("statement", "code", "err"),
    [
        ("raise RunError('the disk is full')", 1, "error: the disk is full\n"),
        ("raise UsageError('no such file')", 2, "error: no such file\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        ("raise ValueError('x')", 1, "error: ValueError: x (this is a defect; --debug shows where it happened)\n"),
        ("import no_such_part", 2, "error: this command needs the module no_such_part, which is not installed\n"),
        ("return 3", 3, ""),
    ],
)
def test_the_exit_code_says_how_a_command_ended(tmp_path: Path, statement: str, code: int, err: str) -> None:
    source = f"""
from headrace.engine.errors import RunError, UsageError
def add_arguments(parser): ...
def run(args):
    {statement}
"""
    ended = run_made_command(tmp_path, source)
    assert (ended.returncode, ended.stderr) == (code, err)


def test_a_command_that_cannot_be_imported_leaves_the_others_usable(tmp_path: Path) -> None:
    ended = run_made_command(tmp_path, "import no_such_part")
    assert ended.returncode == 2
    assert "needs the module no_such_part" in ended.stderr
    assert main(["config", "schema"]) == 0


def test_a_reader_that_leaves_early_causes_no_noise() -> None:
    writer = subprocess.Popen(
        [sys.executable, "-m", "headrace.clients.cli.main", "config", "schema"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert writer.stdout is not None and writer.stderr is not None
    writer.stdout.close()
    assert writer.stderr.read() == b""
    writer.stderr.close()
    assert writer.wait(timeout=60) == 1


def test_the_help_needs_less_than_0_3_s_of_processor_time() -> None:
    program = "import resource, subprocess, sys\n"
    program += (
        "subprocess.run([sys.executable, '-m', 'headrace.clients.cli.main', '--help'], stdout=subprocess.DEVNULL)\n"
    )
    program += "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime)"
    times = [float(subprocess.check_output([sys.executable, "-c", program], text=True)) for _ in range(3)]
    assert min(times) < 0.3
