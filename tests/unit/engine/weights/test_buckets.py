"""The cut of a state into buckets, and the part of a rank."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import InputError
from headrace.engine.types import BucketEncoding, PolicyVersion, TensorSpec
from headrace.engine.weights.buckets import DeltaPart, cut_range
from headrace.engine.weights.chain import VersionChain
from headrace.engine.weights.delta import apply_change, decode_bucket, encoded_bucket, pack_planes
from headrace.engine.weights.digest import DIGEST_MODULUS, state_digest
from headrace.engine.weights.layout import BUCKET_ELEMENTS, num_elements
from headrace.engine.weights.planes import diff_bucket
from headrace.engine.weights.ulp import RawArray

TENSORS = (
    TensorSpec(name="embed", dtype="bfloat16", shape=(40, 25)),
    TensorSpec(name="norm", dtype="float32", shape=(30,)),
    TensorSpec(name="head", dtype="bfloat16", shape=(3, 7)),
)
BASE, NEW = PolicyVersion(0, 4), PolicyVersion(0, 5)


@settings(deadline=None)
@given(st.integers(0, 3 * BUCKET_ELEMENTS), st.integers(0, 3 * BUCKET_ELEMENTS))
def test_the_buckets_of_a_shard_cover_it_and_cross_no_border(start: int, count: int) -> None:
    buckets = list(cut_range(start, start + count))
    assert sum(num for _, num in buckets) == count
    for first, num in buckets:
        assert first == start and 0 < num <= BUCKET_ELEMENTS
        assert first // BUCKET_ELEMENTS == (first + num - 1) // BUCKET_ELEMENTS
        start += num


def states() -> tuple[list[RawArray], list[RawArray]]:
    rng = np.random.default_rng(0)
    base: list[RawArray] = [
        rng.integers(0, 1 << 16, 1000, np.uint16),
        rng.integers(0, 1 << 32, 30, np.uint32),
        rng.integers(0, 1 << 16, 21, np.uint16),
    ]
    new = [array.copy() for array in base]
    new[0][::50] += np.uint16(1)
    new[2][:] = rng.integers(0, 1 << 16, 21, np.uint16)
    return base, new


def part(base: list[RawArray], new: list[RawArray], shards: list[tuple[int, int, int]]) -> DeltaPart:
    """What a rank that holds these (tensor, start, end) publishes."""
    found = DeltaPart(TENSORS, run_id="run", version=NEW, base=BASE)
    for index, begin, stop in shards:
        for start, count in cut_range(begin, stop):
            before, after = base[index][start : start + count], new[index][start : start + count]
            planes = diff_bucket(before, after, name_id=index, start=start)
            digest = (state_digest(index, start, before) + planes.digest_change) % DIGEST_MODULUS
            found.add(index, start, pack_planes(planes, lambda whole=after: whole), digest)
    return found


def test_parts_of_two_ranks_are_sealed_and_lead_a_receiver_to_the_state_and_its_digest() -> None:
    base, new = states()
    parts = [
        part(base, new, [(0, 0, 333), (1, 0, 30)]),
        part(base, new, [(0, 333, 1000), (2, 0, 21)]),
    ]
    chain = VersionChain("run", num_ranks=2, root=BASE)
    assert chain.offer_part(0, parts[0].manifest(), token=1) is None
    sealed = chain.offer_part(1, parts[1].manifest(), token=1)
    assert sealed is not None
    payload = memoryview(b"".join(piece for rank in parts for piece in rank.payloads()))
    assert payload.nbytes == sealed.payload_bytes
    assert {bucket.encoding for bucket in sealed.buckets} == {
        BucketEncoding.SAME,
        BucketEncoding.GAP_ULP,
        BucketEncoding.DENSE,
    }
    shadow = [array.copy() for array in base]
    for bucket in sealed.buckets:
        piece = shadow[bucket.tensor_index][bucket.start : bucket.start + bucket.count]
        apply_change(piece, decode_bucket(encoded_bucket(bucket, payload), piece))
    for have, awaited in zip(shadow, new, strict=True):
        assert have.tobytes() == awaited.tobytes()
    digest = sum(state_digest(index, 0, array) for index, array in enumerate(new)) % DIGEST_MODULUS
    assert sealed.digest == digest


@pytest.mark.parametrize(("index", "start", "count"), [(3, 0, 1), (-1, 0, 1), (1, 29, 2), (1, -1, 2)])
def test_a_bucket_outside_its_tensor_is_refused(index: int, start: int, count: int) -> None:
    encoded = pack_planes(diff_bucket(*[np.zeros(count, np.uint32)] * 2), lambda: np.zeros(count, np.uint32))
    with pytest.raises(InputError):
        DeltaPart(TENSORS, run_id="run", version=NEW, base=BASE).add(index, start, encoded, 0)


def test_a_bucket_across_a_border_is_refused() -> None:
    spec = TensorSpec(name="w", dtype="bfloat16", shape=(2 * BUCKET_ELEMENTS,))
    encoded = pack_planes(diff_bucket(*[np.zeros(20, np.uint16)] * 2), lambda: np.zeros(20, np.uint16))
    found = DeltaPart((spec,), run_id="run", version=NEW, base=BASE)
    with pytest.raises(InputError, match="cut_range"):
        found.add(0, BUCKET_ELEMENTS - 10, encoded, 0)
    found.add(0, BUCKET_ELEMENTS, encoded, 0)
    assert num_elements(spec) == 2 * BUCKET_ELEMENTS and len(found.manifest().buckets) == 1
