"""Full weight updates as one file: verified and mapped by each receiver. `keyframe.py` writes them.

Invariants:
- A keyframe's buckets cover each element exactly once, each where the layout puts it; `verify_payload` proves it
  before a receiver touches a parameter.
- Nothing here interprets a payload as anything but numbers.
"""

import contextlib
import mmap
import os
from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash

from headrace.engine.errors import CorruptUpdateError, FormatError
from headrace.engine.types import BucketEncoding, TensorSpec, UpdateKind, WeightManifest, WeightUpdate
from headrace.engine.weights.digest import DIGEST_MODULUS, state_digest
from headrace.engine.weights.keyframe import KeyframeWriter
from headrace.engine.weights.layout import (
    BUCKET_ELEMENTS,
    element_bytes,
    layout_hash,
    num_elements,
    payload_size,
    raw_dtype,
    tensor_offsets,
)
from headrace.engine.weights.ulp import RawArray

__all__ = [
    "BUCKET_ELEMENTS",
    "KeyframeWriter",
    "RawArray",
    "layout_hash",
    "map_payload",
    "open_payload",
    "payload_size",
    "verify_payload",
]


def verify_payload(update: WeightUpdate) -> None:
    """Prove that a keyframe is whole and is what its manifest says. Reads the payload once; blocks meanwhile.

    Raises:
        CorruptUpdateError: Layout, sizes, coverage, a checksum or the digest do not agree, or the file cannot be read.
    """
    manifest = update.manifest
    offsets = _verify_structure(manifest)
    digest = 0
    with _mapped(update) as payload:
        for bucket in manifest.buckets:
            piece = payload[bucket.payload_offset : bucket.payload_offset + bucket.payload_bytes]
            spec = manifest.tensors[bucket.tensor_index]
            if xxhash.xxh3_64_intdigest(piece) != bucket.payload_checksum:
                raise CorruptUpdateError(_at(manifest, f"the payload of {spec.name!r} at {bucket.start} is damaged"))
            bits = np.frombuffer(piece, raw_dtype(spec.dtype))
            state = state_digest(bucket.tensor_index, bucket.start, bits)
            del bits
            if state != bucket.state_checksum:
                raise CorruptUpdateError(_at(manifest, f"the state of {spec.name!r} at {bucket.start} is damaged"))
            digest += state
            piece.release()
    if digest % DIGEST_MODULUS != manifest.digest:
        raise CorruptUpdateError(_at(manifest, "the digest is not the sum of the buckets' checksums"))
    assert offsets[-1] == manifest.payload_bytes


def open_payload(update: WeightUpdate) -> Mapping[str, tuple[TensorSpec, RawArray]]:
    """Map a keyframe read-only: for each tensor its spec and its bits, uint16 or uint32, in the tensor's shape.

    Structure is checked, contents are not (`verify_payload` does). The mapping lives as long as any of the arrays and
    outlives the removal of the file.

    Raises:
        CorruptUpdateError: Layout, sizes or coverage do not agree, or the file cannot be read.
    """
    manifest = update.manifest
    offsets = _verify_structure(manifest)
    mapped = map_payload(update)
    views: dict[str, tuple[TensorSpec, RawArray]] = {}
    for spec, offset in zip(manifest.tensors, offsets, strict=False):
        count = num_elements(spec)
        dtype: np.dtype[Any] = np.dtype(raw_dtype(spec.dtype))
        array = np.frombuffer(mapped, dtype, count, offset) if count else np.empty(0, dtype)
        array.flags.writeable = False
        views[spec.name] = (spec, array.reshape(spec.shape))
    return MappingProxyType(views)


def map_payload(update: WeightUpdate) -> mmap.mmap | bytes:
    """Map the file of an update read-only; empty bytes for an empty one. The mapping outlives the file's name.

    Raises:
        CorruptUpdateError: The file cannot be read, or has another size than the manifest says.
    """
    manifest = update.manifest
    try:
        with open(update.local_path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != manifest.payload_bytes:
                raise CorruptUpdateError(_at(manifest, f"its file has {size} bytes, not {manifest.payload_bytes}"))
            # A shared map, so that the workers of a host read the same pages.
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise CorruptUpdateError(_at(manifest, f"{update.local_path} cannot be read: {error.strerror}")) from error


def _at(manifest: WeightManifest, what: str) -> str:
    return f"Update {manifest.version} of run {manifest.run_id!r} is refused: {what}."


def _verify_structure(manifest: WeightManifest) -> tuple[int, ...]:
    """Check everything that needs no payload; returns the layout's offsets. Python integers cannot overflow."""
    try:
        offsets = tensor_offsets(manifest.tensors)
    except FormatError as error:
        raise CorruptUpdateError(_at(manifest, str(error).rstrip("."))) from error
    if manifest.kind != UpdateKind.KEYFRAME or manifest.base is not None:
        raise CorruptUpdateError(_at(manifest, "it is not a keyframe without a base"))
    if manifest.layout_hash != layout_hash(manifest.tensors):
        raise CorruptUpdateError(_at(manifest, "the layout hash is not that of its tensors"))
    if manifest.payload_bytes != offsets[-1]:
        raise CorruptUpdateError(_at(manifest, f"it has {manifest.payload_bytes} bytes, its layout {offsets[-1]}"))
    _verify_coverage(manifest, offsets)
    return offsets


def _verify_coverage(manifest: WeightManifest, offsets: tuple[int, ...]) -> None:
    reached = [0] * len(manifest.tensors)
    for bucket in sorted(manifest.buckets, key=lambda b: (b.tensor_index, b.start)):
        if not 0 <= bucket.tensor_index < len(manifest.tensors):
            raise CorruptUpdateError(_at(manifest, f"a bucket names the absent tensor {bucket.tensor_index}"))
        spec = manifest.tensors[bucket.tensor_index]
        size = element_bytes(spec)
        if bucket.start != reached[bucket.tensor_index] or not 0 < bucket.count <= BUCKET_ELEMENTS:
            fault = "overlap" if bucket.start < reached[bucket.tensor_index] else "leave a gap or have a wrong size"
            raise CorruptUpdateError(_at(manifest, f"buckets of {spec.name!r} {fault} at {bucket.start}"))
        reached[bucket.tensor_index] += bucket.count
        place = (offsets[bucket.tensor_index] + bucket.start * size, bucket.count * size)
        if bucket.encoding != BucketEncoding.DENSE or (bucket.payload_offset, bucket.payload_bytes) != place:
            raise CorruptUpdateError(_at(manifest, f"a bucket of {spec.name!r} does not lie where the layout puts it"))
    for spec, count in zip(manifest.tensors, reached, strict=True):
        if count != num_elements(spec):
            raise CorruptUpdateError(_at(manifest, f"of {spec.name!r} {count} elements are there, not all"))


@contextlib.contextmanager
def _mapped(update: WeightUpdate) -> Generator[memoryview]:
    mapped = map_payload(update)
    view = memoryview(mapped)
    try:
        yield view
    finally:
        view.release()
        if isinstance(mapped, mmap.mmap):
            with contextlib.suppress(BufferError):
                # A slice may still be held by an error's traceback; the map then closes with it.
                mapped.close()
