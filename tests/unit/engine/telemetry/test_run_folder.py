import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from headrace.engine.errors import ConfigError, StorageError, UsageError
from headrace.engine.telemetry import RunFolder

NOW = 1_790_000_000.0


def test_a_new_folder_has_its_files_and_latest_points_at_it(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs", "demo", "[run]\n", NOW)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(NOW))
    assert folder.path == tmp_path / "runs" / f"demo-{stamp}"
    assert folder.config_path.read_text() == "[run]\n"
    names = {"config.toml", "metrics.jsonl", "samples.jsonl", "log.txt", "checkpoints", "sockets"}
    assert set(os.listdir(folder.path)) == names
    assert (tmp_path / "runs" / "latest").resolve() == folder.path
    folder.close()


def test_two_runs_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path, "demo", "", NOW)
    second = RunFolder.create(tmp_path, "demo", "", NOW)
    assert second.path.name == f"{first.path.name}-2"
    assert (tmp_path / "latest").resolve() == second.path
    first.close()
    second.close()


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "two words", "x" * 101])
def test_a_name_that_is_no_plain_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        RunFolder.create(tmp_path / "runs", name, "", NOW)
    assert not (tmp_path / "runs").exists()


def test_sockets_lie_in_a_private_folder_with_a_short_path_that_goes_away(tmp_path: Path) -> None:
    parent = tmp_path / ("long" * 30)
    folder = RunFolder.create(parent, "demo", "", NOW)
    path = folder.socket_path("rollout-0.sock")
    assert len(os.fsencode(path)) < 100
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert (folder.path / "sockets").resolve() == path.parent.resolve()
    with pytest.raises(StorageError, match="use a shorter name"):
        folder.socket_path("x" * 100)
    folder.close()
    folder.close()
    assert not path.parent.exists()
    assert not (folder.path / "sockets").is_symlink()


def test_what_a_killed_run_left_of_its_sockets_goes_when_the_folder_is_opened(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo", "", NOW)
    left_over = folder.socket_folder
    copy = tmp_path / "copy"
    shutil.copytree(folder.path, copy, symlinks=True)
    again = RunFolder.open(copy, NOW)
    assert not left_over.exists()
    assert again.socket_folder.is_dir()
    again.close()
    folder.close()


def test_a_link_to_somebody_elses_folder_is_taken_away_but_not_the_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo", "", NOW)
    folder.close()
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o700)
    (folder.path / "sockets").symlink_to(precious)
    RunFolder.open(folder.path, NOW).close()
    assert precious.is_dir()


def test_a_folder_in_use_is_not_opened_twice(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo", "", NOW)
    with pytest.raises(UsageError, match="in use by another process"):
        RunFolder.open(folder.path, NOW)
    assert folder.socket_folder.is_dir()
    folder.close()
    RunFolder.open(folder.path, NOW).close()


def test_resuming_cuts_torn_lines_and_rows_that_run_again_and_the_log_says_so(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo", "", NOW)
    folder.metrics_path.write_text("".join(f'{{"step": {i}, "time": 1.0}}\n' for i in range(6)) + '{"step": 6, "ti')
    folder.samples_path.write_text('{"step": 3}\n{"step": 4}\n')
    folder.close()
    again = RunFolder.open(tmp_path / "latest", NOW, first_step=4)
    assert again.path == folder.path
    assert [line[9] for line in again.metrics_path.read_text().splitlines()] == ["0", "1", "2", "3"]
    assert again.samples_path.read_text() == '{"step": 3}\n'
    log = again.log_path.read_text()
    assert "cut a torn last line of 15 bytes off metrics.jsonl" in log
    assert "going on with step 4: removed 2 metrics rows and 1 samples of steps that run again" in log
    again.close()


def test_an_evaluation_that_was_not_finished_is_told_from_one_that_was(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo", "", NOW)
    folder.metrics_path.write_text('{"step": 2, "eval/accuracy": 0.5}\n{"step": 4, "actor/lr": 0.1}\nedited\n')
    assert folder.has_evaluation(2) and not folder.has_evaluation(4)
    folder.close()


def test_a_folder_without_a_configuration_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run folder"):
        RunFolder.open(tmp_path, NOW)


def test_latest_that_is_a_real_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    RunFolder.create(tmp_path, "demo", "", NOW).close()
    assert (tmp_path / "latest").is_dir() and not (tmp_path / "latest").is_symlink()


def test_a_parent_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        RunFolder.create(tmp_path / "file" / "runs", "demo", "", NOW)
