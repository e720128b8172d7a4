"""The files that hold the payloads of updates: whose part lies where, and the one file that receivers read.

Invariants:

1. An update is named by its version and base. The ranks of a keyframe share one file. Each rank's part of a delta is a
   file of its own; before the version is sealed they are laid end to end, in the order of the ranks, in one more file.
2. A part that is refused leaves no trace: it is forgotten, and removed if it was written here.
3. An older update's files are removed once nobody needs them. Who has one mapped keeps its bytes.

Blocks for small copies where a method says so.
"""

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from headrace.engine.errors import CorruptUpdateError, StorageError
from headrace.engine.types import PolicyVersion, WeightManifest
from headrace.engine.weights.placement import open_reserved

# An update: its version, and the base that it starts from.
Form = tuple[PolicyVersion, PolicyVersion | None]

_COPY_BYTES = 16 << 20


def form_of(manifest: WeightManifest) -> Form:
    """What names the update that a manifest describes."""
    return manifest.version, manifest.base


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFile:
    """One rank's part as it was published.

    Attributes:
        path: The file.
        num_bytes: Its size, by the part's manifest.
        num_changed: Elements that differ from the base.
        encode_s: How long the rank took to find and encode them.
    """

    path: Path
    num_bytes: int
    num_changed: int = 0
    encode_s: float = 0.0


class UpdateFiles:
    """Knows the files of all updates that are published or about to be."""

    def __init__(self, folder: Path) -> None:
        """`folder` takes what is written here: streamed parts, and joined ones."""
        self._folder = folder
        self._parts: dict[Form, dict[int, PartFile]] = {}
        self._joined: dict[Form, Path] = {}

    def place(self, form: Form, rank: int) -> Path:
        """Where a part that is streamed is to be written."""
        return self._folder / f"{_name(form)}{'' if form[1] is None else f'-rank{rank}'}.bin"

    def add(self, form: Form, rank: int, part: PartFile) -> None:
        """Take note of a rank's part.

        Raises:
            CorruptUpdateError: It is one of a keyframe, and another rank's part lies in another file.
        """
        others = self._parts.get(form, {})
        if form[1] is None:
            for other in others.values():
                if other.path != part.path:
                    raise CorruptUpdateError(
                        f"the ranks put version {form[0]} into two files, {other.path} and {part.path}"
                    )
        self._parts.setdefault(form, others)[rank] = part

    def refuse(self, form: Form, rank: int) -> None:
        """Forget a rank's part that was refused, and what was joined with it; removes what was written here."""
        joined = self._joined.pop(form, None)
        if joined is not None and len(self._parts[form]) > 1:
            joined.unlink(missing_ok=True)
        part = self._parts[form].pop(rank)
        shared = any(other.path == part.path for other in self._parts[form].values())
        if part.path == self.place(form, rank) and not shared:
            part.path.unlink(missing_ok=True)
        if not self._parts[form]:
            del self._parts[form]

    def parts(self, form: Form) -> list[PartFile]:
        """The parts of an update in the order of the ranks."""
        return [part for _, part in sorted(self._parts.get(form, {}).items())]

    def join(self, form: Form) -> None:
        """Make the one file of an update whose parts are all there. Blocks for a copy of a delta of several ranks.

        Raises:
            CorruptUpdateError: A part's file has another size than its manifest says, or cannot be read.
            StorageError: There is no room.
        """
        parts = self.parts(form)
        if form[1] is None or len(parts) == 1:
            self._joined[form] = parts[0].path
            return
        path = self._folder / f"{_name(form)}.bin"
        path.unlink(missing_ok=True)  # of an attempt that was refused
        target = open_reserved(path, sum(part.num_bytes for part in parts))
        try:
            offset = 0
            for part in parts:
                _append(part, target, offset, path)
                offset += part.num_bytes
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(target)
        self._joined[form] = path
        for part in parts:  # the bytes are in the joined file
            part.path.unlink(missing_ok=True)

    def path(self, form: Form) -> Path:
        """The file of a sealed update."""
        return self._joined[form]

    def remove_before(self, newest: PolicyVersion, needed: Collection[Form]) -> None:
        """Remove the files of updates older than `newest` that are not needed."""
        for form in [form for form in self._parts if form[0] < newest and form not in needed]:
            paths = {part.path for part in self._parts.pop(form).values()}
            joined = self._joined.pop(form, None)
            for path in paths if joined is None else paths | {joined}:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()


def _name(form: Form) -> str:
    version, base = form
    name = f"v{version.incarnation}-{version.version}"
    return name if base is None else f"{name}-from-{base.incarnation}-{base.version}"


def _append(part: PartFile, target: int, offset: int, path: Path) -> None:
    try:
        source = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CorruptUpdateError(f"the part {part.path} cannot be read: {error.strerror}") from error
    try:
        size = os.fstat(source).st_size
        if size != part.num_bytes:
            raise CorruptUpdateError(f"the part {part.path} has {size} bytes, its manifest says {part.num_bytes}")
        copied = 0
        while copied < size:
            data = os.pread(source, _COPY_BYTES, copied)
            if not data:
                raise CorruptUpdateError(f"the part {part.path} ends at byte {copied} of {size}")
            copied += os.pwrite(target, data, offset + copied)
    except OSError as error:
        raise StorageError(f"joining {part.path} into {path} failed: {error.strerror}") from error
    finally:
        os.close(source)
