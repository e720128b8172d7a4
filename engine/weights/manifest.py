"""One manifest out of the parts of all ranks.

A keyframe's parts share one payload: their offsets are the layout's and need no change. Each part of a delta has a
payload of its own; joined, they lie end to end in the order of the ranks.
"""

from collections.abc import Sequence

import msgspec

from headrace.engine.errors import CorruptUpdateError, FormatError
from headrace.engine.types import UpdateKind, WeightBucket, WeightManifest
from headrace.engine.weights.digest import DIGEST_MODULUS
from headrace.engine.weights.layout import layout_hash, num_elements


def digest_of(buckets: Sequence[WeightBucket]) -> int:
    """The sum of the state checksums modulo 2**64: the digest of the elements that the buckets cover."""
    return sum(bucket.state_checksum for bucket in buckets) % DIGEST_MODULUS


def merge_manifests(parts: Sequence[WeightManifest]) -> WeightManifest:
    """Join the parts of one version, in the order of the ranks, and prove that they are a whole.

    Returns:
        The manifest of the update: all buckets by tensor and start, and the digest of the whole state. Of a delta,
        bucket offsets count from the start of all payloads laid end to end.

    Raises:
        CorruptUpdateError: There is no part; the parts disagree on run, version, base, kind, layout or (keyframe)
            payload size; a part's digest or the layout hash is wrong; a bucket lies outside its payload; or the buckets
            together overlap or leave an element out.
    """
    if not parts:
        raise CorruptUpdateError("an update without parts was given; a part of each rank is needed")
    first = parts[0]
    _check_layout(first)
    shared = first.kind is UpdateKind.KEYFRAME
    buckets: list[WeightBucket] = []
    offset = 0
    for rank, part in enumerate(parts):
        _check_agreement(first, part, rank)
        _check_part(part, rank)
        if offset == 0:
            buckets.extend(part.buckets)
        else:
            buckets.extend(
                msgspec.structs.replace(bucket, payload_offset=bucket.payload_offset + offset)
                for bucket in part.buckets
            )
        offset += 0 if shared else part.payload_bytes
    buckets.sort(key=lambda bucket: (bucket.tensor_index, bucket.start))
    _check_coverage(first, buckets)
    return msgspec.structs.replace(
        first,
        buckets=tuple(buckets),
        payload_bytes=first.payload_bytes if shared else offset,
        digest=digest_of(buckets),
    )


def _check_layout(manifest: WeightManifest) -> None:
    if (manifest.kind is UpdateKind.KEYFRAME) != (manifest.base is None):
        raise _corrupt(manifest, f"a {manifest.kind.name.lower()} with base {manifest.base}: only a delta has a base")
    if layout_hash(manifest.tensors) != manifest.layout_hash:
        raise _corrupt(manifest, "the layout hash is not that of its tensors")


def _check_agreement(first: WeightManifest, part: WeightManifest, rank: int) -> None:
    for name in ("run_id", "version", "base", "kind", "layout_hash", "tensors"):
        if getattr(part, name) != getattr(first, name):
            raise _corrupt(first, f"rank {rank} disagrees with rank 0 on the {name.replace('_', ' ')}")
    if first.kind is UpdateKind.KEYFRAME and part.payload_bytes != first.payload_bytes:
        raise _corrupt(first, f"rank {rank} has a payload of {part.payload_bytes} bytes, rank 0 {first.payload_bytes}")


def _check_part(part: WeightManifest, rank: int) -> None:
    for bucket in part.buckets:
        end = bucket.payload_offset + bucket.payload_bytes
        if bucket.payload_offset < 0 or bucket.payload_bytes < 0 or end > part.payload_bytes:
            raise _corrupt(part, f"a bucket of rank {rank} ends at byte {end} of a payload of {part.payload_bytes}")
    if digest_of(part.buckets) != part.digest:
        raise _corrupt(part, f"the digest of rank {rank} is not the sum of its buckets' state checksums")


def _check_coverage(manifest: WeightManifest, buckets: Sequence[WeightBucket]) -> None:
    """Each element of each tensor once; `buckets` are sorted by tensor and start."""
    reached = [0] * len(manifest.tensors)
    for bucket in buckets:
        if not 0 <= bucket.tensor_index < len(manifest.tensors) or bucket.count < 1:
            raise _corrupt(manifest, f"a bucket has {bucket.count} elements of tensor number {bucket.tensor_index}")
        done = reached[bucket.tensor_index]
        if bucket.start != done:
            name = manifest.tensors[bucket.tensor_index].name
            fault = "overlap" if bucket.start < done else "leave a gap"
            raise _corrupt(manifest, f"the buckets of {name!r} {fault} between elements {done} and {bucket.start}")
        reached[bucket.tensor_index] += bucket.count
    for spec, done in zip(manifest.tensors, reached, strict=True):
        try:
            count = num_elements(spec)
        except FormatError as error:
            raise _corrupt(manifest, str(error)) from error
        if done != count:
            raise _corrupt(manifest, f"the buckets of {spec.name!r} cover {done} of its {count} elements")


def _corrupt(manifest: WeightManifest, what: str) -> CorruptUpdateError:
    return CorruptUpdateError(
        f"update {manifest.version} of run {manifest.run_id!r} is refused: {what}; publish it again"
    )
