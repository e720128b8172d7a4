"""Buckets encoded against a base: round trips, the choice of encoding, merging, refusals of a wrong base."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import CorruptUpdateError, InputError, WrongBaseError
from headrace.engine.types import BucketEncoding, WeightBucket
from headrace.engine.weights.delta import (
    BucketChange,
    EncodedBucket,
    apply_change,
    decode_bucket,
    encode_bucket,
    encode_change,
    encoded_bucket,
    merge_changes,
)
from headrace.engine.weights.digest import DIGEST_MODULUS, state_digest
from headrace.engine.weights.layout import BUCKET_ELEMENTS
from headrace.engine.weights.planes import diff_bucket
from headrace.engine.weights.ulp import RawArray

# What floats have beside numbers: zeros, denormals, infinities, NaNs with payloads, the largest of either sign.
SPECIAL_16 = [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFC1, 0x7FFF, 0xFFFF, 0x7C00, 0xFC01]
SPECIAL_32 = [0, 1 << 31, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFC12345, 0xFFFFFFFF]


@st.composite
def states(draw: st.DrawFn, num: int = 2) -> list[RawArray]:
    """States of one bucket, each made of the one before by changes of every kind."""
    raw, special = draw(st.sampled_from([(np.uint16, SPECIAL_16), (np.uint32, SPECIAL_32)]))
    top = np.iinfo(raw).max
    count = draw(st.integers(1, 3000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found: list[RawArray] = [rng.integers(0, top, count, raw, endpoint=True)]
    for _ in range(num - 1):
        new = found[-1].copy()
        density = draw(st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0]))
        moved = np.flatnonzero(rng.random(count) < density)
        new[moved] += rng.choice(np.array([1, 1, 1, 2, top, top, top - 1], raw), len(moved))
        # All drawn, so that an example shrinks.
        for position in draw(st.lists(st.integers(0, count - 1), max_size=5)):
            new[position] = draw(st.sampled_from(special))
        if draw(st.booleans()):
            new[draw(st.integers(0, count - 1)) :] = draw(st.sampled_from(special))
        found.append(new)
    return found


def apply(base: RawArray, change: BucketChange) -> RawArray:
    state = base.copy()
    apply_change(state, change)
    return state


def trained(count: int, density: float, *, raw: Any = np.uint16, seed: int = 0) -> tuple[RawArray, RawArray]:
    """A state of ordinary numbers, and one in which some of them moved by one or two ulps."""
    rng = np.random.default_rng(seed)
    base = (rng.normal(0, 0.05, count).astype(np.float32).view(np.uint32) >> (32 - 8 * np.dtype(raw).itemsize)).astype(
        raw
    )
    new = base.copy()
    moved = np.flatnonzero(rng.random(count) < density)
    top = np.iinfo(raw).max
    new[moved] += rng.choice(np.array([1, 1, 1, 2, top, top, top], raw), len(moved))
    return base, new


@settings(deadline=None, max_examples=60)
@given(states())
def test_every_state_comes_back_bit_for_bit_and_a_repeated_apply_is_harmless(found: list[RawArray]) -> None:
    base, new = found
    kept = base.copy()
    change = decode_bucket(encode_bucket(base, new), base)
    assert np.array_equal(base, kept)
    state = apply(base, change)
    assert state.tobytes() == new.tobytes()
    assert apply(state, change).tobytes() == new.tobytes()


@settings(deadline=None, max_examples=60)
@given(states(), st.integers(0, 2**31), st.integers(0, 2**31))
def test_the_planes_carry_the_change_of_the_digest(found: list[RawArray], name_id: int, start: int) -> None:
    base, new = found
    planes = diff_bucket(base, new, name_id=name_id, start=start)
    after = (state_digest(name_id, start, base) + planes.digest_change) % DIGEST_MODULUS
    assert after == state_digest(name_id, start, new)


@settings(deadline=None, max_examples=60)
@given(states(), st.data())
def test_the_buckets_of_any_split_lead_to_the_same_state_and_digest(found: list[RawArray], data: st.DataObject) -> None:
    base, new = found
    cuts = data.draw(st.sets(st.integers(1, len(base)), max_size=4)) | {len(base)}
    state, digest, begin = base.copy(), state_digest(1, 0, base), 0
    for end in sorted(cuts):
        part = slice(begin, end)
        digest += diff_bucket(base[part], new[part], name_id=1, start=begin).digest_change
        apply_change(state[part], decode_bucket(encode_bucket(base[part], new[part]), base[part]))
        begin = end
    assert state.tobytes() == new.tobytes()
    assert digest % DIGEST_MODULUS == state_digest(1, 0, new)


@settings(deadline=None, max_examples=60)
@given(states(num=3))
def test_two_changes_merged_are_the_change_between_the_ends(found: list[RawArray]) -> None:
    first, middle, last = found
    one = decode_bucket(encode_bucket(first, middle), first)
    two = decode_bucket(encode_bucket(middle, last), middle)
    merged = merge_changes(one, two)
    assert apply(first, merged).tobytes() == last.tobytes()
    assert encode_change(first, merged) == encode_bucket(first, last)


def test_a_state_that_is_the_same_takes_no_bytes() -> None:
    base, _ = trained(1000, 0)
    encoded = encode_bucket(base, base.copy())
    assert (encoded.encoding, encoded.payload) == (BucketEncoding.SAME, b"")
    assert len(decode_bucket(encoded, base).values) == 0


def test_small_steps_are_written_as_steps_within_the_bytes_that_are_promised() -> None:
    for density, most in ((0.01, 1.5), (0.34, 0.85)):
        base, new = trained(1 << 20, density)
        encoded = encode_bucket(base, new)
        assert encoded.encoding is BucketEncoding.GAP_ULP
        assert len(encoded.payload) / np.count_nonzero(base != new) < most


@pytest.mark.parametrize("raw", [np.uint16, np.uint32])
def test_far_jumps_are_written_as_values(raw: Any) -> None:
    base, _ = trained(10_000, 0, raw=raw)
    new = base.copy()
    new[::100] = np.random.default_rng(1).integers(0, np.iinfo(raw).max, 100, raw)
    encoded = encode_bucket(base, new)
    assert encoded.encoding is BucketEncoding.GAP_VALUE
    assert apply(base, decode_bucket(encoded, base)).tobytes() == new.tobytes()


def test_values_win_where_steps_fit_but_do_not_compress() -> None:
    base = np.random.default_rng(0).integers(0x3F80, 0x3FFF, 10_000, np.uint16)
    new = base.copy()
    new[::2] = 0x3F90
    assert encode_bucket(base, new).encoding is BucketEncoding.GAP_VALUE


def test_a_state_that_is_new_everywhere_is_dense_and_needs_no_base() -> None:
    rng = np.random.default_rng(0)
    base, new = (rng.integers(0, 1 << 16, 5000, np.uint16) for _ in range(2))
    encoded = encode_bucket(base, new)
    assert (encoded.encoding, encoded.payload) == (BucketEncoding.DENSE, new.tobytes())
    assert apply(base, decode_bucket(encoded, base[::-1].copy())).tobytes() == new.tobytes()


@pytest.mark.parametrize("kind", ["steps", "values"])
def test_a_base_that_differs_where_elements_changed_is_refused(kind: str) -> None:
    base, new = trained(10_000, 0.01)
    if kind == "values":
        new[::100] = np.random.default_rng(1).integers(0, 1 << 16, 100, np.uint16)
    encoded = encode_bucket(base, new)
    other = base.copy()
    other[np.flatnonzero(base != new)[7]] ^= 1
    with pytest.raises(WrongBaseError, match="ask for a keyframe"):
        decode_bucket(encoded, other)


def test_the_new_state_itself_is_a_wrong_base() -> None:
    base, new = trained(10_000, 0.01)
    with pytest.raises(WrongBaseError):
        decode_bucket(encode_bucket(base, new), new)


def test_a_bucket_of_another_size_is_refused() -> None:
    base, new = trained(1000, 0.1)
    with pytest.raises(CorruptUpdateError, match="a bucket of 1000 elements came for a base of 999"):
        decode_bucket(encode_bucket(base, new), base[:-1])


def test_a_bucket_is_found_in_the_whole_payload_and_not_outside_of_it() -> None:
    base, new = trained(1000, 0.1)
    encoded = encode_bucket(base, new)
    bucket = encoded.described(tensor_index=2, start=0, payload_offset=5, state_checksum=9)
    whole = memoryview(b"12345" + bytes(encoded.payload) + b"rest")
    assert isinstance(bucket, WeightBucket)
    assert apply(base, decode_bucket(encoded_bucket(bucket, whole), base)).tobytes() == new.tobytes()
    with pytest.raises(CorruptUpdateError, match="ends at byte"):
        encoded_bucket(bucket, whole[:-5])


@pytest.mark.parametrize(
    ("base", "new"),
    [
        (np.zeros(3, np.float32), np.zeros(3, np.float32)),
        (np.zeros((2, 2), np.uint16), np.zeros((2, 2), np.uint16)),
        (np.zeros(0, np.uint16), np.zeros(0, np.uint16)),
        (np.zeros(3, np.uint16), np.zeros(4, np.uint16)),
        (np.zeros(3, np.uint16), np.zeros(3, np.uint32)),
        (np.zeros(BUCKET_ELEMENTS + 1, np.uint16), np.zeros(BUCKET_ELEMENTS + 1, np.uint16)),
    ],
)
def test_what_is_no_bucket_is_refused_by_the_encoder(base: np.ndarray, new: np.ndarray) -> None:
    with pytest.raises(InputError):
        encode_bucket(base, new)


def test_a_bucket_that_is_not_aligned_in_memory_is_encoded_the_same() -> None:
    base, new = trained(5001, 0.05)
    # Begins two bytes after a multiple of eight.
    shifted = [np.concatenate([state[:1], state])[1:] for state in (base, new)]
    assert encode_bucket(*shifted) == encode_bucket(base, new)
    assert isinstance(encode_bucket(base, new), EncodedBucket)
