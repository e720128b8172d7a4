"""Payloads that are cut short, damaged or made up: each is refused, quickly and without much memory."""

import struct
import time
import tracemalloc

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import WeightUpdateError
from headrace.engine.types import BucketEncoding
from headrace.engine.weights.delta import BucketChange, EncodedBucket, decode_bucket, encode_bucket
from headrace.engine.weights.layout import BUCKET_ELEMENTS
from headrace.engine.weights.ulp import RawArray

GAP_ULP, GAP_VALUE = BucketEncoding.GAP_ULP, BucketEncoding.GAP_VALUE


def states(kind: BucketEncoding, count: int = 2000) -> tuple[RawArray, RawArray]:
    rng = np.random.default_rng(0)
    base = rng.integers(0x3C00, 0x3F80, count, np.uint16)
    new = base.copy()
    moved = np.flatnonzero(rng.random(count) < 0.1)
    new[moved] += rng.choice(np.array([1, 2, 65535], np.uint16), len(moved))
    new[moved[::20]] = 0xFFFF
    if kind is GAP_VALUE:
        new[moved] = rng.integers(0, 1 << 16, len(moved), np.uint16)
    if kind is BucketEncoding.DENSE:
        new = rng.integers(0, 1 << 16, count, np.uint16)
    return base, new


def sent(kind: BucketEncoding, payload: bytes, count: int) -> EncodedBucket:
    """With the right checksum, as an enemy would send it."""
    checksum = xxhash.xxh3_64_intdigest(payload)
    return EncodedBucket(encoding=kind, count=count, payload=payload, payload_checksum=checksum)


def frame(changed: int, gap_bytes: int, escapes: int, *planes: bytes, sizes: tuple[int, ...] | None = None) -> bytes:
    sizes = tuple(map(len, planes)) if sizes is None else sizes
    return struct.pack(f"<QIII{len(sizes)}I", 0, changed, gap_bytes, escapes, *sizes) + b"".join(planes)


@pytest.mark.parametrize("kind", [GAP_ULP, GAP_VALUE, BucketEncoding.DENSE])
def test_a_payload_cut_at_any_byte_is_refused_even_with_a_right_checksum(kind: BucketEncoding) -> None:
    base, new = states(kind)
    payload = bytes(encode_bucket(base, new).payload)
    assert encode_bucket(base, new).encoding is kind
    for length in range(len(payload)):
        with pytest.raises(WeightUpdateError):
            decode_bucket(sent(kind, payload[:length], len(base)), base)
    with pytest.raises(WeightUpdateError):
        decode_bucket(sent(kind, payload + b"\0", len(base)), base)


@pytest.mark.parametrize("kind", [GAP_ULP, GAP_VALUE, BucketEncoding.DENSE])
def test_every_flipped_bit_is_found_by_the_checksum(kind: BucketEncoding) -> None:
    base, new = states(kind, 300)
    encoded = encode_bucket(base, new)
    for position in range(len(encoded.payload)):
        damaged = bytearray(encoded.payload)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(WeightUpdateError, match="damaged"):
            decode_bucket(
                EncodedBucket(
                    encoding=kind,
                    count=encoded.count,
                    payload=bytes(damaged),
                    payload_checksum=encoded.payload_checksum,
                ),
                base,
            )


GOOD = {kind: (states(kind)[0], bytes(encode_bucket(*states(kind)).payload)) for kind in (GAP_ULP, GAP_VALUE)}


@settings(deadline=None, max_examples=300)
@given(st.sampled_from([GAP_ULP, GAP_VALUE]), st.data())
def test_a_damaged_payload_with_a_right_checksum_is_refused_or_leads_into_the_bucket(
    kind: BucketEncoding, data: st.DataObject
) -> None:
    base, good = GOOD[kind]
    payload = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    _refused_or_sound(sent(kind, bytes(payload), len(base)), base)


@settings(deadline=None)
@given(st.sampled_from(list(BucketEncoding)), st.binary(max_size=80))
def test_any_bytes_are_refused_or_lead_into_the_bucket(kind: BucketEncoding, payload: bytes) -> None:
    _refused_or_sound(sent(kind, payload, 30), np.zeros(30, np.uint16))


def _refused_or_sound(encoded: EncodedBucket, base: RawArray) -> None:
    try:
        change: BucketChange = decode_bucket(encoded, base)
    except WeightUpdateError:
        return
    if change.positions is None:
        assert len(change.values) == len(base)
    else:
        assert len(change.positions) == len(change.values)
        assert np.all(np.diff(change.positions) > 0)
        assert not len(change.positions) or 0 <= change.positions[0] <= change.positions[-1] < len(base)


def zeros_frame(num_bytes: int) -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(num_bytes))


HUGE = 0xFFFF_FFFF
BOMBS = {
    "changes beyond the bucket": frame(HUGE, HUGE, 0, b"", b"", b""),
    "as many changes as elements, without data": frame(1000, 1000, 0, b"", b"", b""),
    "no changes": frame(0, 0, 0, b"", b"", b""),
    "gaps beyond all skips": frame(3, HUGE, 0, b"123", b"123", b""),
    "fewer gaps than changes": frame(3, 2, 0, b"12", b"123", b""),
    "more escapes than changes": frame(3, 3, HUGE, b"123", b"123", b""),
    "stored sizes beyond the payload": frame(3, 3, 0, b"123", b"123", b"", sizes=(HUGE, HUGE, HUGE)),
    "a frame of a gigabyte": frame(1000, 1000, 0, zeros_frame(1 << 30)[:40], b"\1" * 1000, b""),
    "a frame of 64 MiB that is whole": frame(1000, 1000, 0, zeros_frame(64 << 20), b"\1" * 1000, b""),
    "a frame that announces nothing": frame(
        100, 100, 0, zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100)), b"\1" * 100, b""
    ),
    "two frames": frame(200, 200, 0, zeros_frame(200) + zeros_frame(200), b"\1" * 200, b""),
    "a frame with a huge window": frame(200, 200, 0, b"\x28\xb5\x2f\xfd\x40\xff\xc8\x00\x01\x00\x00", b"\1" * 200, b""),
    "not a frame": frame(200, 200, 0, b"not a frame at all", b"\1" * 200, b""),
    "an empty plane": frame(200, 200, 0, b"", b"\1" * 200, b""),
}


@pytest.mark.parametrize("bomb", list(BOMBS))
def test_k091_header_bomb_announced_sizes_are_checked_before_anything_is_allocated(bomb: str) -> None:
    base = np.zeros(1000, np.uint16)
    encoded = sent(GAP_ULP, BOMBS[bomb], 1000)
    tracemalloc.start()
    begin = time.perf_counter()
    try:
        with pytest.raises(WeightUpdateError):
            decode_bucket(encoded, base)
        assert time.perf_counter() - begin < 0.1
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_k091_header_bomb_a_bucket_larger_than_the_base_or_than_allowed_is_refused() -> None:
    base = np.zeros(10, np.uint16)
    for count in (11, BUCKET_ELEMENTS + 1, 1 << 62, -1):
        for kind in BucketEncoding:
            with pytest.raises(WeightUpdateError, match=f"a bucket of {count} elements came for a base of 10"):
                decode_bucket(sent(kind, b"", count), base)
