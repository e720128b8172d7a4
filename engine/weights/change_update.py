"""What an engine asks of a delta before it touches a parameter, and how it answers for what it refuses.

A delta reaches an engine from its host's agent, as a change file under a manifest without buckets. Both say where the
change starts and where it leads; only a file that says what its manifest says, of the state that is served, is opened.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.engine.errors import CorruptUpdateError, UnknownLayoutError, WeightUpdateError, WrongBaseError
from headrace.engine.types import AckStatus, PolicyVersion, WeightUpdate
from headrace.engine.weights.chain import check_base
from headrace.engine.weights.changes import WeightChange, read_change_file


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedState:
    """What an engine serves.

    Attributes:
        version: Its version.
        digest: Of the whole state, as the last update named it; 0 where none is known.
        layout_hash: Of that update's tensors; 0 where no full update has been loaded, or the last one failed half-way.
    """

    version: PolicyVersion
    digest: int = 0
    layout_hash: int = 0


def open_change_update(update: WeightUpdate, served: ServedState) -> Sequence[WeightChange]:
    """Map a delta's change file, proved to lead from what is served to what its manifest names.

    Reads the file once; blocks meanwhile. Positions are not looked at: `changes.check_change` does.

    Raises:
        WrongBaseError: It starts elsewhere, or no full update has been loaded: a checkpoint's own weights have no
            digest, so nobody can tell that they are the base.
        UnknownLayoutError: It is for other tensors.
        CorruptUpdateError: The file cannot be read, is damaged, or is not the one that the manifest means.
    """
    manifest = update.manifest
    if not served.layout_hash:
        raise WrongBaseError(f"update {manifest.version} is a delta, and no full update is served yet; send a keyframe")
    check_base(served.version, manifest)
    if manifest.layout_hash != served.layout_hash:
        raise UnknownLayoutError(f"update {manifest.version} has other tensors than those served; send a keyframe")
    table, changes = read_change_file(Path(update.local_path))
    found = (table.run_id, table.base, table.version, table.digest)
    if found != (manifest.run_id, manifest.base, manifest.version, manifest.digest):
        raise CorruptUpdateError(
            f"{update.local_path} leads from {table.base} to {table.version} of run {table.run_id!r}, its manifest "
            f"from {manifest.base} to {manifest.version} of run {manifest.run_id!r}, or to another digest; send another"
        )
    return changes


def refusal_status(error: WeightUpdateError) -> AckStatus:
    """How an update is answered for that this error refused; FAILED where it is none of the named findings."""
    if isinstance(error, WrongBaseError):
        return AckStatus.WRONG_BASE
    if isinstance(error, UnknownLayoutError):
        return AckStatus.UNKNOWN_LAYOUT
    return AckStatus.CORRUPT if isinstance(error, CorruptUpdateError) else AckStatus.FAILED
