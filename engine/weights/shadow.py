"""One host's copy of the published state, bit for bit, moved from version to version by sealed updates.

The copy is a file in shared memory, laid out as a dense payload is, and mapped by the one process that moves it. Nobody
else reads it: workers get change files and whole states written from it, which never change once they have a name.

Invariants:

1. `version` and `digest` are those of the bytes that are there. While they are moved, and after a failure half-way,
   `version` is None, and nothing can be read until a keyframe has come.
2. An update is decoded and verified whole, up to the digest of the state that it leads to, before the first byte is
   written; one that is refused changes nothing.
3. The digest follows each change; writing a whole state computes it anew from all bytes, which is the audit.

Every method blocks; they are called from one thread.
"""

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace.engine.errors import CorruptUpdateError, WeightUpdateError, WrongBaseError
from headrace.engine.types import (
    BucketEncoding,
    PolicyVersion,
    TensorSpec,
    UpdateKind,
    WeightBucket,
    WeightManifest,
    WeightUpdate,
)
from headrace.engine.weights.chain import check_base
from headrace.engine.weights.change_log import Touched
from headrace.engine.weights.delta import BucketChange, apply_change, decode_bucket, encoded_bucket
from headrace.engine.weights.digest import DIGEST_MODULUS, change_digest, state_digest
from headrace.engine.weights.keyframe import KeyframeWriter
from headrace.engine.weights.layout import BUCKET_ELEMENTS, layout_hash, num_elements, raw_dtype, tensor_offsets
from headrace.engine.weights.manifest import merge_manifests
from headrace.engine.weights.payload import map_payload, verify_payload
from headrace.engine.weights.placement import open_reserved
from headrace.engine.weights.planes import changed_elements
from headrace.engine.weights.ulp import RawArray

# Decoded changes that are held between verifying and writing; what exceeds this is decoded a second time.
_HELD_BYTES = 256 << 20

# Of a whole state, which elements are looked at to see whether most of them are new.
_SAMPLED_ONE_IN = 997
_WHOLE_ABOVE_ONE_IN = 3


class Shadow:
    """The state that a host has. Empty at first; the file appears with the first keyframe."""

    def __init__(self, path: Path, *, held_bytes: int = _HELD_BYTES) -> None:
        """`path` is where the copy is kept; a file that is there is replaced. `held_bytes` bounds what is buffered."""
        self._path = path
        self._held_bytes = held_bytes
        self._mapped: mmap.mmap | None = None
        self._views: list[RawArray] = []
        self._run_id = ""
        self.tensors: tuple[TensorSpec, ...] = ()
        self.version: PolicyVersion | None = None
        self.digest = 0

    @property
    def num_bytes(self) -> int:
        """Of the copy."""
        return 0 if self._mapped is None else len(self._mapped)

    def apply(self, update: WeightUpdate) -> list[Touched] | None:
        """Move to the update's version, or refuse it and stay.

        Returns:
            The elements that changed; None where the state before is of no use to say so (there was none, it was of
            another layout or incarnation, or a whole state came of which most is new).

        Raises:
            WrongBaseError: A delta from another version or state, or for another layout.
            CorruptUpdateError: The update is damaged, cut short or no whole.
            StorageError: There is no room for the copy.
        """
        if update.manifest.kind is UpdateKind.KEYFRAME:
            return self._replace(update)
        return self._move(update)

    def read(self, tensor_index: int, start: int, count: int) -> RawArray:
        """Bits of consecutive elements of a flattened tensor: a view, to be copied before the next `apply`.

        Raises:
            WeightUpdateError: There is no state.
        """
        if self.version is None:
            raise WeightUpdateError("the host has no state yet; wait for a keyframe")
        return self._views[tensor_index][start : start + count]

    def write_keyframe(self, path: Path) -> WeightUpdate:
        """Write the whole state to a new file, and prove that it still has its digest.

        Raises:
            WeightUpdateError: There is no state.
            CorruptUpdateError: The copy is damaged; it is given up, and nothing is left at `path`.
            StorageError: There is no room.
        """
        if self.version is None:
            raise WeightUpdateError("the host has no state yet; wait for a keyframe")
        path.unlink(missing_ok=True)
        try:
            with KeyframeWriter(path, self.tensors, run_id=self._run_id, version=self.version) as writer:
                for index, view in enumerate(self._views):
                    writer.write(index, 0, view)
                manifest = writer.manifest()
            self._compare(manifest.digest)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return WeightUpdate(manifest=manifest, local_path=str(path))

    def audit(self) -> None:
        """Prove that the copy still has its digest. Reads all of it.

        Raises:
            CorruptUpdateError: It does not; it is given up.
        """
        if self.version is not None:
            digest = sum(state_digest(index, 0, view) for index, view in enumerate(self._views) if len(view))
            self._compare(digest % DIGEST_MODULUS)

    def close(self) -> None:
        """Unmap and remove the copy. May be called twice."""
        self.version, self._views = None, []
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            with contextlib.suppress(BufferError):  # a view that is still held keeps the map
                mapped.close()
            self._path.unlink(missing_ok=True)

    def _compare(self, found: int) -> None:
        if found != self.digest:
            version, self.version = self.version, None
            raise CorruptUpdateError(
                f"the host's copy of version {version} has the digest {found:016x} instead of {self.digest:016x}; it "
                "is given up for a keyframe"
            )

    # Whole states

    def _replace(self, update: WeightUpdate) -> list[Touched] | None:
        manifest = update.manifest
        verify_payload(update)
        _check_cut(manifest)
        payload = map_payload(update)
        before = self.version
        if self.tensors != manifest.tensors or self._mapped is None:
            before = None
            self._make_room(manifest)
        if before is not None and self._mostly_changed(manifest, payload):
            before = None
        self.version = None
        copy = self._copy_all if before is None else self._copy
        touched = [copy(manifest, bucket, payload) for bucket in manifest.buckets]
        self._run_id, self.version, self.digest = manifest.run_id, manifest.version, manifest.digest
        known = before is not None and before.incarnation == manifest.version.incarnation
        return touched if known else None

    def _mostly_changed(self, manifest: WeightManifest, payload: mmap.mmap | bytes) -> bool:
        """Whether a whole state serves receivers better than a list of what changed; looks at some elements."""
        changed = sampled = 0
        for bucket in manifest.buckets:
            differs = self._bucket(bucket)[::_SAMPLED_ONE_IN] != _dense(manifest, bucket, payload)[::_SAMPLED_ONE_IN]
            changed, sampled = changed + int(np.count_nonzero(differs)), sampled + len(differs)
        return changed * _WHOLE_ABOVE_ONE_IN > sampled

    def _copy_all(self, manifest: WeightManifest, bucket: WeightBucket, payload: mmap.mmap | bytes) -> Touched:
        self._bucket(bucket)[:] = _dense(manifest, bucket, payload)
        return _touched(bucket, None)

    def _copy(self, manifest: WeightManifest, bucket: WeightBucket, payload: mmap.mmap | bytes) -> Touched:
        target = self._bucket(bucket)
        positions, _, values = changed_elements(target, _dense(manifest, bucket, payload))
        target[positions] = values
        return _touched(bucket, positions)

    def _make_room(self, manifest: WeightManifest) -> None:
        self.close()
        offsets = tensor_offsets(manifest.tensors)
        self._path.unlink(missing_ok=True)
        descriptor = open_reserved(self._path, offsets[-1])
        try:
            self._mapped = mmap.mmap(descriptor, offsets[-1]) if offsets[-1] else None
        finally:
            os.close(descriptor)
        self.tensors = manifest.tensors
        self._views = []
        for spec, offset in zip(manifest.tensors, offsets, strict=False):
            count = num_elements(spec)
            dtype: np.dtype[Any] = np.dtype(raw_dtype(spec.dtype))
            empty = np.empty(0, dtype)
            self._views.append(np.frombuffer(self._mapped, dtype, count, offset) if count and self._mapped else empty)

    # Deltas

    def _move(self, update: WeightUpdate) -> list[Touched]:
        manifest = update.manifest
        check_base(self.version, manifest)
        if manifest.run_id != self._run_id or manifest.layout_hash != layout_hash(self.tensors):
            raise WrongBaseError(
                f"the delta to version {manifest.version} of run {manifest.run_id!r} is for other tensors or another "
                "run than the host has; ask for a keyframe"
            )
        merge_manifests([manifest])  # proves that the buckets cover each element once
        _check_cut(manifest)
        payload = memoryview(map_payload(update))
        held: dict[int, BucketChange] = {}
        digest, room = self.digest, self._held_bytes
        for number, bucket in self._changed(manifest):
            change, moved = self._decode(bucket, payload)
            digest += moved
            room -= change.values.nbytes + (0 if change.positions is None else change.positions.nbytes)
            if room >= 0:
                held[number] = change
        if digest % DIGEST_MODULUS != manifest.digest:
            raise WrongBaseError(
                f"version {manifest.version} would have the digest {digest % DIGEST_MODULUS:016x} here instead of "
                f"{manifest.digest:016x}, so the base is not the state that it was encoded against; ask for a keyframe"
            )
        self.version = None
        touched: list[Touched] = []
        for number, bucket in self._changed(manifest):
            change = held.pop(number) if number in held else self._decode(bucket, payload)[0]
            apply_change(self._bucket(bucket), change)
            touched.append(_touched(bucket, change.positions))
        self.version, self.digest = manifest.version, manifest.digest
        return touched

    def _changed(self, manifest: WeightManifest) -> Iterator[tuple[int, WeightBucket]]:
        for number, bucket in enumerate(manifest.buckets):
            if bucket.encoding is not BucketEncoding.SAME or bucket.payload_bytes:
                yield number, bucket

    def _decode(self, bucket: WeightBucket, payload: memoryview) -> tuple[BucketChange, int]:
        """What changes in a bucket, and by how much that moves the digest. Writes nothing."""
        base = self._bucket(bucket)
        change = decode_bucket(encoded_bucket(bucket, payload), base)
        index, start = bucket.tensor_index, bucket.start
        if change.positions is None:
            return change, state_digest(index, start, change.values) - state_digest(index, start, base)
        if not len(change.positions):
            return change, 0
        return change, change_digest(index, start, change.positions, base[change.positions], change.values)

    def _bucket(self, bucket: WeightBucket) -> RawArray:
        return self._views[bucket.tensor_index][bucket.start : bucket.start + bucket.count]


def _dense(manifest: WeightManifest, bucket: WeightBucket, payload: mmap.mmap | bytes) -> RawArray:
    dtype: np.dtype[Any] = np.dtype(raw_dtype(manifest.tensors[bucket.tensor_index].dtype))
    return np.frombuffer(payload, dtype, bucket.count, bucket.payload_offset)


def _check_cut(manifest: WeightManifest) -> None:
    for bucket in manifest.buckets:
        if bucket.start % BUCKET_ELEMENTS + bucket.count > BUCKET_ELEMENTS:
            raise CorruptUpdateError(
                f"a bucket of version {manifest.version} has {bucket.count} elements from {bucket.start} on; it may "
                f"not cross a multiple of {BUCKET_ELEMENTS}"
            )


def _touched(bucket: WeightBucket, positions: Any) -> Touched:
    return Touched(tensor_index=bucket.tensor_index, start=bucket.start, count=bucket.count, positions=positions)
