"""Incremental updates: a bucket encoded against its base, decoded, applied, merged. Pure functions over flat arrays.

How a sender uses it (one per rank; its image is the state that it published last, in the bits that are published):

    planes = diff_bucket(image[a:b], new[a:b], name_id=tensor_index, start=start)    # for each bucket of its shards
    encoded = pack_planes(planes, lambda: new[a:b])
    buckets.append(encoded.described(..., state_checksum=(digests[bucket] + planes.digest_change) % DIGEST_MODULUS))
    # published; the image takes the changes, and `digests` theirs, only when the version is sealed and acknowledged

How a receiver uses it (its shadow holds the base; `digest` is that of the whole shadow):

    check_base(have, manifest)                                                       # chain.py
    for bucket in manifest.buckets:
        change = decode_bucket(encoded_bucket(bucket, payload), shadow[a:b])         # writes nothing
        digest += change_digest(...)                                                 # of the change alone
    # compares with manifest.digest; only then, in the fence:
    apply_change(shadow[a:b], change)                                                # again is harmless

Invariants:

1. Bits are moved, never computed with: NaN payloads, infinities, denormals and both zeros arrive as they were.
2. A decoded change holds absolute values, so applying it twice, or after another one of the same version, is harmless.
3. Decoding writes nothing and refuses everything that is not wholly right: the payload's checksum, every size, every
   position, and the checksum of the changed elements before and after, which fails where the base is another one.
4. The encoder chooses the smallest encoding; a decoder takes any.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from headrace.engine.errors import CorruptUpdateError, WrongBaseError
from headrace.engine.types import BucketEncoding, WeightBucket
from headrace.engine.weights.frame import FrameHeader, compressed, pack_frame, unpack_frame
from headrace.engine.weights.gaps import Positions, decode_gaps
from headrace.engine.weights.planes import (
    BucketPlanes,
    change_checksum,
    check_bucket,
    diff_bucket,
    little_endian,
    planes_of_changes,
)
from headrace.engine.weights.ulp import Bytes, RawArray, decode_steps

# Steps that take more bytes than this an element leave room for the values to be smaller, and both are tried.
_TRY_VALUES_ABOVE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBucket:
    """A bucket as it travels.

    Attributes:
        encoding: How the payload is written.
        count: Elements of the bucket.
        payload: Empty for SAME.
        payload_checksum: xxh3-64 of the payload, seed 0.
    """

    encoding: BucketEncoding
    count: int
    payload: bytes | memoryview
    payload_checksum: int

    def described(self, *, tensor_index: int, start: int, payload_offset: int, state_checksum: int) -> WeightBucket:
        """The bucket's line in a manifest; `state_checksum` is the digest of its new state."""
        return WeightBucket(
            tensor_index=tensor_index,
            start=start,
            count=self.count,
            encoding=self.encoding,
            payload_offset=payload_offset,
            payload_bytes=len(self.payload),
            payload_checksum=self.payload_checksum,
            state_checksum=state_checksum,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketChange:
    """A decoded bucket: absolute values.

    Attributes:
        positions: Which elements of the bucket, strictly increasing, shape [n]; None for all of them.
        values: Their new bits, shape [n], uint16 or uint32.
    """

    positions: Positions | None
    values: RawArray


def encode_bucket(base: RawArray, new: RawArray) -> EncodedBucket:
    """Encode `new` against `base` in the smallest encoding.

    Args:
        base: Bits of the base state, uint16 or uint32, shape [count].
        new: Bits of the new state, of the same dtype and shape.

    Raises:
        InputError: Dtypes or shapes differ or are not allowed, or the bucket is too large.
    """
    return pack_planes(diff_bucket(base, new), lambda: new)


def dense_bucket(new: RawArray) -> EncodedBucket:
    """A bucket written out whole, whatever its base is; `new` are its bits, shape [count]."""
    return _encoded(BucketEncoding.DENSE, len(new), little_endian(new).tobytes())


def pack_planes(planes: BucketPlanes, dense: Callable[[], RawArray]) -> EncodedBucket:
    """Compress planes and choose among the encodings.

    Args:
        planes: From `diff_bucket`, or from a device.
        dense: Gives the bucket's whole new state, shape [count]; called only where nothing else is smaller.
    """
    if not len(planes.values):
        return _encoded(BucketEncoding.SAME, planes.count, b"")
    gaps = compressed(planes.gaps)
    encoding, payload = BucketEncoding.GAP_ULP, _ulp_payload(planes, gaps)
    if len(payload) - len(gaps) > _TRY_VALUES_ABOVE * len(planes.values):
        other = _value_payload(planes, gaps)
        if len(other) < len(payload):
            encoding, payload = BucketEncoding.GAP_VALUE, other
    if len(payload) >= planes.count * planes.values.dtype.itemsize:
        encoding, payload = BucketEncoding.DENSE, little_endian(dense()).tobytes()
    return _encoded(encoding, planes.count, payload)


def encoded_bucket(bucket: WeightBucket, payload: memoryview) -> EncodedBucket:
    """The bucket of a manifest, out of the update's whole payload. Copies nothing.

    Raises:
        CorruptUpdateError: It lies outside the payload.
    """
    end = bucket.payload_offset + bucket.payload_bytes
    if bucket.payload_offset < 0 or bucket.payload_bytes < 0 or end > payload.nbytes:
        raise CorruptUpdateError(f"a bucket ends at byte {end} of a payload of {payload.nbytes} bytes")
    return EncodedBucket(
        encoding=bucket.encoding,
        count=bucket.count,
        payload=payload[bucket.payload_offset : end],
        payload_checksum=bucket.payload_checksum,
    )


def decode_bucket(encoded: EncodedBucket, base: RawArray) -> BucketChange:
    """Decode a bucket against the state that it was encoded against. Writes nothing to `base`.

    Args:
        encoded: As received; nothing in it is trusted.
        base: Bits of the base state, uint16 or uint32, shape [count].

    Raises:
        InputError: `base` is not the bits of a bucket.
        CorruptUpdateError: The payload is damaged, cut short, or not for a bucket of this size.
        WrongBaseError: The payload is whole, but `base` is not the state that it was encoded against.
    """
    check_bucket(base, "base")
    size = base.dtype.itemsize
    if encoded.count != len(base):
        raise CorruptUpdateError(f"a bucket of {encoded.count} elements came for a base of {len(base)}")
    if xxhash.xxh3_64_intdigest(encoded.payload) != encoded.payload_checksum:
        raise CorruptUpdateError(f"a bucket's payload of {len(encoded.payload)} bytes is damaged")
    if encoded.encoding is BucketEncoding.SAME:
        _check_length(encoded, 0)
        return BucketChange(positions=np.empty(0, np.int64), values=np.empty(0, base.dtype))
    if encoded.encoding is BucketEncoding.DENSE:
        _check_length(encoded, len(base) * size)
        return BucketChange(positions=None, values=_bits(np.frombuffer(encoded.payload, np.uint8), base))
    header, planes = unpack_frame(encoded.encoding, encoded.payload, len(base), size)
    positions = decode_gaps(planes[0], header.num_changed, len(base))
    old = base[positions]
    if encoded.encoding is BucketEncoding.GAP_ULP:
        values = decode_steps(old, planes[1], _bits(planes[2], base))
    else:
        values = _bits(np.stack(planes[1:], axis=1).reshape(-1), base)
    if change_checksum(old, values) != header.change_checksum:
        raise WrongBaseError(
            f"{header.num_changed} changed elements do not have the checksum that they were sent with, so the base is "
            "not the state that they were encoded against; ask for a keyframe"
        )
    return BucketChange(positions=positions, values=values)


def apply_change(target: RawArray, change: BucketChange) -> None:
    """Write the new values into `target`, shape [count]. May be repeated."""
    if change.positions is None:
        target[:] = change.values
    else:
        target[change.positions] = change.values


def merge_changes(first: BucketChange, second: BucketChange) -> BucketChange:
    """One change that does what the first and then the second do."""
    if second.positions is None:
        return second
    if first.positions is None:
        values = first.values.copy()
        values[second.positions] = second.values
        return BucketChange(positions=None, values=values)
    positions = np.union1d(first.positions, second.positions)
    values = np.empty(len(positions), second.values.dtype)
    values[np.searchsorted(positions, first.positions)] = first.values
    values[np.searchsorted(positions, second.positions)] = second.values
    return BucketChange(positions=positions, values=values)


def encode_change(base: RawArray, change: BucketChange) -> EncodedBucket:
    """Encode a known change: the same bytes as `encode_bucket` for the state that it leads to.

    Args:
        base: Bits of the base state, shape [count].
        change: Absolute values; those that `base` holds already are left out.
    """
    check_bucket(base, "base")
    if change.positions is None:
        return encode_bucket(base, change.values)
    old = base[change.positions]
    moved = old != change.values
    positions = change.positions[moved]

    def dense() -> RawArray:
        state = base.copy()
        apply_change(state, change)
        return state

    return pack_planes(planes_of_changes(len(base), positions, old[moved], change.values[moved]), dense)


def _ulp_payload(planes: BucketPlanes, gaps: bytes) -> bytes:
    escapes = little_endian(planes.escapes).view(np.uint8)
    return pack_frame(_header(planes, len(planes.escapes)), (gaps, compressed(planes.steps), compressed(escapes)))


def _value_payload(planes: BucketPlanes, gaps: bytes) -> bytes:
    size = planes.values.dtype.itemsize
    columns = little_endian(planes.values).view(np.uint8).reshape(-1, size)
    stored = [compressed(np.ascontiguousarray(columns[:, byte])) for byte in range(size)]
    return pack_frame(_header(planes, 0), (gaps, *stored))


def _header(planes: BucketPlanes, num_escapes: int) -> FrameHeader:
    return FrameHeader(
        change_checksum=planes.change_checksum,
        num_changed=len(planes.values),
        gap_bytes=len(planes.gaps),
        num_escapes=num_escapes,
    )


def _encoded(encoding: BucketEncoding, count: int, payload: bytes) -> EncodedBucket:
    return EncodedBucket(
        encoding=encoding, count=count, payload=payload, payload_checksum=xxhash.xxh3_64_intdigest(payload)
    )


def _check_length(encoded: EncodedBucket, awaited: int) -> None:
    if len(encoded.payload) != awaited:
        raise CorruptUpdateError(
            f"a {encoded.encoding.name} bucket of {encoded.count} elements has {len(encoded.payload)} bytes, "
            f"not {awaited}"
        )


def _bits(plane: Bytes, like: RawArray) -> RawArray:
    return plane.view(like.dtype.newbyteorder("<")).astype(like.dtype, copy=False)
