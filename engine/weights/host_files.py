"""The files behind a host's offers: its copy of the state, and what is written from it for receivers to map.

Invariants:

1. A file that was handed out never changes; it goes away when no offer needs it. Who has it mapped keeps its bytes.
2. A file is made from the version that the offer names, or not at all.
3. A keyframe that came as a file is handed on as it is, under a name of our own.
4. Where the folder has no room, the fallback takes what comes from then on; that is slower, and said once.

Every method blocks. All are called from one thread at a time.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import numpy as np

from headrace.engine.errors import StorageError
from headrace.engine.types import PolicyVersion, TensorSpec, UpdateKind, WeightManifest, WeightUpdate
from headrace.engine.weights.change_log import Touched
from headrace.engine.weights.changes import PositionArray, WeightChange, write_changes
from headrace.engine.weights.gaps import Positions
from headrace.engine.weights.host_offers import Offer
from headrace.engine.weights.layout import layout_hash, num_elements
from headrace.engine.weights.shadow import Shadow

log = logging.getLogger(__name__)

_INT32_ELEMENTS = 1 << 31


class HostFiles:
    """A folder of our own with the copy of the state and the files made from it."""

    def __init__(self, folder: Path, run_id: str, fallback: Path | None = None) -> None:
        """Make the folder, empty: what an agent that died has left there is removed.

        Args:
            folder: Ours alone; best in shared memory.
            run_id: Stands in what is made.
            fallback: Another one, for when the first is full.

        Raises:
            StorageError: The folder cannot be made.
        """
        self._folders = [folder] if fallback is None else [folder, fallback]
        for old in self._folders:
            shutil.rmtree(old, ignore_errors=True)
        self._folder = _made(folder)
        self._run_id = run_id
        self._made: dict[Offer, WeightUpdate] = {}
        self.shadow = Shadow(folder / "shadow.bin")

    def apply(self, update: WeightUpdate) -> list[Touched] | None:
        """See `Shadow.apply`."""
        try:
            touched = self.shadow.apply(update)
        except StorageError as error:
            self._fall_back(error)
            self.shadow.close()
            self.shadow = Shadow(self._folder / "shadow.bin")
            touched = self.shadow.apply(update)
        if update.manifest.kind is UpdateKind.KEYFRAME:
            self._keep(update)
        return touched

    def make(self, offer: Offer, since: Callable[[PolicyVersion], Iterable[Touched]]) -> WeightUpdate | None:
        """The update for an offer, made once; None where the copy is of another version by now.

        Args:
            offer: What is to be made.
            since: What changed from a version to that of the copy.

        Raises:
            CorruptUpdateError: The copy is damaged; it is given up.
            StorageError: There is no room.
        """
        if self.shadow.version != offer.version:
            return None
        if offer not in self._made:
            try:
                self._made[offer] = self._write(offer, since)
            except StorageError as error:
                self._fall_back(error)
                self._made[offer] = self._write(offer, since)
        return self._made[offer]

    def sweep(self, needed: Collection[Offer]) -> None:
        """Remove files that are neither needed nor of the copy's version."""
        for offer in [offer for offer in self._made if offer.version != self.shadow.version and offer not in needed]:
            Path(self._made.pop(offer).local_path).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything. May be called twice."""
        self.shadow.close()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _fall_back(self, error: StorageError) -> None:
        """Use the other folder from now on; raises the error where that is in use already, or not there."""
        if self._folder is self._folders[-1]:
            raise error
        self._folder = _made(self._folders[-1])
        log.warning("weights of this host go to %s from now on, which is slower: %s", self._folder, error)

    def _write(self, offer: Offer, since: Callable[[PolicyVersion], Iterable[Touched]]) -> WeightUpdate:
        if offer.base is None:
            return self.shadow.write_keyframe(self._path("keyframe", offer))
        return self._write_changes(offer, offer.base, since(offer.base))

    def _keep(self, update: WeightUpdate) -> None:
        offer = Offer(version=update.manifest.version, base=None)
        path = self._path("keyframe", offer)
        path.unlink(missing_ok=True)
        self._made.pop(offer, None)
        with contextlib.suppress(OSError):  # on another file system; then it is written when somebody asks for it
            os.link(update.local_path, path)
            self._made[offer] = WeightUpdate(manifest=update.manifest, local_path=str(path))

    def _write_changes(self, offer: Offer, base: PolicyVersion, touched: Iterable[Touched]) -> WeightUpdate:
        shadow = self.shadow
        path = self._path("changes", offer)
        write_changes(
            path,
            _changes(shadow, touched),
            digest=shadow.digest,
            run_id=self._run_id,
            base=base,
            version=offer.version,
        )
        manifest = WeightManifest(
            run_id=self._run_id,
            version=offer.version,
            base=base,
            kind=UpdateKind.DELTA,
            layout_hash=layout_hash(shadow.tensors),
            tensors=shadow.tensors,
            buckets=(),
            payload_bytes=path.stat().st_size,
            digest=shadow.digest,
        )
        return WeightUpdate(manifest=manifest, local_path=str(path))

    def _path(self, kind: str, offer: Offer) -> Path:
        base = "" if offer.base is None else f"-from-{offer.base.version}"
        return self._folder / f"{kind}-{offer.version.incarnation}-{offer.version.version}{base}.bin"


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise StorageError(f"cannot make the folder for weights {folder}: {error.strerror}") from error
    return folder


def _changes(shadow: Shadow, touched: Iterable[Touched]) -> Iterator[WeightChange]:
    """For each tensor one change with all positions, and one for each range of which all is given."""
    tensor_index, positions = -1, list[Positions]()
    for one in touched:
        if one.tensor_index != tensor_index:
            yield from _at_positions(shadow, tensor_index, positions)
            tensor_index, positions = one.tensor_index, []
        if one.positions is None:
            name = shadow.tensors[one.tensor_index].name
            yield WeightChange(name=name, start=one.start, values=shadow.read(one.tensor_index, one.start, one.count))
        else:
            positions.append(one.positions + one.start)
    yield from _at_positions(shadow, tensor_index, positions)


def _at_positions(shadow: Shadow, tensor_index: int, positions: list[Positions]) -> Iterator[WeightChange]:
    if not positions:
        return
    spec = shadow.tensors[tensor_index]
    at = np.concatenate(positions)
    values = shadow.read(tensor_index, 0, num_elements(spec))[at]
    yield WeightChange(name=spec.name, positions=_narrow(at, spec), values=values)


def _narrow(positions: Positions, spec: TensorSpec) -> PositionArray:
    return positions.astype(np.int32) if num_elements(spec) <= _INT32_ELEMENTS else positions
