"""The folder of a run: what it was asked to do, what it did, and what it needs to go on.

    <parent>/latest -> <name>-<YYYYmmdd-HHMMSS>
    <parent>/<name>-<YYYYmmdd-HHMMSS>/
        config.toml      the effective configuration
        metrics.jsonl    one row a step
        samples.jsonl    some samples of each step
        log.txt          lines for people
        checkpoints/
        timeline.json    written at the end, with timeline.spans.jsonl while running
        overlap.svg      written at the end
        sockets -> a short temporary folder, mode 0700, that goes away with the run

Invariants:
    One process at a time has the folder: a lock on it is held from `create` or `open` to `close`, and a dead process
    holds none.
    A path for a Unix socket is shorter than the system's limit, however long the folder's own path is.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Self

import msgspec

from headrace.engine.errors import ConfigError, StorageError, UsageError
from headrace.engine.telemetry.line_file import LineFile, cut_lines_from, cut_torn_line, storage_error, write_whole
from headrace.engine.telemetry.timeline import SPANS_FILE

MAX_SOCKET_PATH_BYTES = 100  # sun_path has 108 on Linux and 104 elsewhere, with the closing zero
_SOCKET_PREFIX = "headrace-"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


class _Row(msgspec.Struct):
    step: int


class RunFolder:
    """Paths of a run folder that this process has; made by `create` or `open`."""

    def __init__(self, path: Path, lock: int, socket_folder: Path) -> None:
        """Use `create` or `open`."""
        self.path = path
        self.config_path = path / "config.toml"
        self.metrics_path = path / "metrics.jsonl"
        self.samples_path = path / "samples.jsonl"
        self.log_path = path / "log.txt"
        self.checkpoints_path = path / "checkpoints"
        self.timeline_path = path / "timeline.json"
        self.spans_path = path / SPANS_FILE
        self.overlap_path = path / "overlap.svg"
        self.socket_folder = socket_folder
        self._lock = lock
        self._log = LineFile(self.log_path)

    @classmethod
    def create(cls, parent: Path, name: str, config_toml: str, now: float) -> Self:
        """Make a new run folder and point `<parent>/latest` at it.

        Args:
            parent: Made if it is missing.
            name: Letters, digits, `.`, `_` and `-`.
            config_toml: Becomes config.toml.
            now: Unix time; the folder's name has it in local time. If the name is taken, `-2`, `-3`, ... follow.

        Raises:
            ConfigError: `name` is not a plain folder name.
            StorageError: The disk is full or not writable.
        """
        if not _PLAIN_NAME.fullmatch(name) or name.startswith("."):
            raise ConfigError(
                f"run.name = {name!r} is not a plain folder name: use up to 100 letters, digits, '.', '_' and '-', "
                "not beginning with '.'"
            )
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        parent = parent.absolute()
        path: Path | None = None
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path = _make_unique(parent, f"{name}-{stamp}")
            (path / "checkpoints").mkdir()
            for file in ("metrics.jsonl", "samples.jsonl", "log.txt"):
                (path / file).touch()
            write_whole(path / "config.toml", config_toml.encode())
            return cls._take(path)
        except BaseException as error:
            if path is not None:  # half a run folder is of no use to anybody
                shutil.rmtree(path, ignore_errors=True)
            if isinstance(error, OSError):
                raise storage_error(Path(error.filename or parent), error) from error
            raise

    @classmethod
    def open(cls, path: Path, now: float, first_step: int | None = None) -> Self:
        """Take an earlier run's folder to go on in it. Torn last lines are cut; new lines are appended.

        Args:
            path: The folder, or a link to it such as `latest`.
            now: Unix time, for the log.
            first_step: As in `cut_rows_from`, which may as well be called later; None cuts nothing.

        Raises:
            UsageError: It is not a run folder, or another process has it.
            StorageError: The disk is full or not writable.
        """
        path = path.absolute()
        if not (path / "config.toml").is_file():
            raise UsageError(f"{path} is not a run folder (it has no config.toml): give the folder of an earlier run")
        folder = cls._take(path.resolve())
        try:
            for file in (folder.metrics_path, folder.samples_path):
                num_bytes = cut_torn_line(file)
                if num_bytes:
                    folder.log(f"cut a torn last line of {num_bytes} bytes off {file.name}", now)
            if first_step is not None:
                folder.cut_rows_from(first_step, now)
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def _take(cls, path: Path) -> Self:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        sockets: Path | None = None
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(
                    f"{path} is in use by another process: wait until that run has ended, or start a new run"
                ) from error
            sockets = _new_socket_folder(path)
            _link_latest(path)
            return cls(path, lock, sockets)
        except BaseException:
            if sockets is not None:
                shutil.rmtree(sockets, ignore_errors=True)
            os.close(lock)
            raise

    def cut_rows_from(self, first_step: int, now: float) -> int:
        """Remove the rows of steps that will run again, from metrics.jsonl and samples.jsonl; the log says so.

        Call it before the files' writers are opened.

        Args:
            first_step: The first step that will run again; rows at or beyond it go.
            now: Unix time, for the log.

        Returns:
            How many rows of metrics.jsonl went.

        Raises:
            StorageError: A file cannot be cut.
        """
        decoder = msgspec.json.Decoder(_Row)

        def is_late(line: bytes) -> bool:
            try:
                return decoder.decode(line).step >= first_step
            except msgspec.MsgspecError:
                return False  # a line that somebody edited is none of ours to remove

        num_rows = cut_lines_from(self.metrics_path, is_late)
        num_samples = cut_lines_from(self.samples_path, is_late)
        self.log(
            f"going on with step {first_step}: removed {num_rows} metrics rows and {num_samples} samples "
            "of steps that run again",
            now,
        )
        return num_rows

    def has_evaluation(self, step: int) -> bool:
        """Whether metrics.jsonl has the row of an evaluation after `step` steps; blocks while it is read.

        Raises:
            StorageError: The file cannot be read.
        """
        try:
            lines = self.metrics_path.read_bytes().splitlines()
        except OSError as error:
            raise StorageError(f"{self.metrics_path} cannot be read: {error.strerror}") from error
        return any(_is_evaluation(line, step) for line in lines)

    def log(self, text: str, now: float) -> None:
        """Append a line to log.txt with the local time of `now` (Unix time); line feeds in it become spaces.

        Raises:
            StorageError: The disk is full or not writable.
        """
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        line = f"{stamp} {' '.join(text.splitlines())}"
        self._log.append(line.encode("utf-8", "replace"))

    def socket_path(self, name: str) -> Path:
        """Where a Unix socket called `name` belongs; nothing is made.

        Raises:
            StorageError: The path would be too long for a socket.
        """
        path = self.socket_folder / name
        num_bytes = len(os.fsencode(path))
        if num_bytes >= MAX_SOCKET_PATH_BYTES:
            raise StorageError(
                f"the socket path {path} has {num_bytes} bytes, fewer than {MAX_SOCKET_PATH_BYTES} are allowed: "
                "use a shorter name"
            )
        return path

    def close(self) -> None:
        """Remove the socket folder and let go of the run folder, which stays. May be called twice."""
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):
            (self.path / "sockets").unlink(missing_ok=True)
        shutil.rmtree(self.socket_folder, ignore_errors=True)
        self._log.close()
        os.close(self._lock)
        self._lock = -1


def _is_evaluation(line: bytes, step: int) -> bool:
    try:
        row = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.MsgspecError:
        return False  # a line that somebody edited
    return row.get("step") == step and any(name.startswith("eval/") for name in row)


def _make_unique(parent: Path, name: str) -> Path:
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def _new_socket_folder(path: Path) -> Path:
    """Make the private folder and link it; what a killed run left there goes first. The lock must be held."""
    link = path / "sockets"
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > MAX_SOCKET_PATH_BYTES // 2:
        base = "/tmp"
    try:
        if link.is_symlink():
            _remove_left_over(link.readlink())
            link.unlink()
        folder = Path(tempfile.mkdtemp(prefix=_SOCKET_PREFIX, dir=base))  # mkdtemp gives mode 0700
        link.symlink_to(folder)
    except OSError as error:
        raise storage_error(link, error) from error
    return folder


def _remove_left_over(folder: Path) -> None:
    # The link could have been changed by hand: only a folder of this very kind is removed.
    with contextlib.suppress(OSError):
        status = folder.lstat()
        if folder.name.startswith(_SOCKET_PREFIX) and status.st_uid == os.getuid() and status.st_mode & 0o777 == 0o700:
            shutil.rmtree(folder, ignore_errors=True)


def _link_latest(path: Path) -> None:
    """Point `latest` at `path`, in one move. Something else of that name is left alone."""
    latest = path.parent / "latest"
    if latest.exists() and not latest.is_symlink():
        return
    part = path.parent / f".latest-{path.name}"
    try:
        part.unlink(missing_ok=True)
        part.symlink_to(path.name)
        os.replace(part, latest)
    except OSError as error:
        raise storage_error(latest, error) from error
