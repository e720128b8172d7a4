import itertools
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import CorruptUpdateError
from headrace.engine.types import (
    BucketEncoding,
    PolicyVersion,
    TensorSpec,
    UpdateKind,
    WeightBucket,
    WeightManifest,
)
from headrace.engine.weights.layout import layout_hash
from headrace.engine.weights.manifest import digest_of, merge_manifests

TENSORS = (
    TensorSpec(name="a", dtype="bfloat16", shape=(4, 3)),
    TensorSpec(name="nothing", dtype="bfloat16", shape=(0, 3)),
    TensorSpec(name="b", dtype="float32", shape=(5,)),
)


def bucket(tensor_index: int, start: int, count: int, offset: int = 0, checksum: int = 1) -> WeightBucket:
    return WeightBucket(
        tensor_index=tensor_index,
        start=start,
        count=count,
        encoding=BucketEncoding.GAP_VALUE,
        payload_offset=offset,
        payload_bytes=10,
        payload_checksum=0,
        state_checksum=checksum,
    )


def part(*buckets: WeightBucket, kind: UpdateKind = UpdateKind.DELTA, payload_bytes: int = 40) -> WeightManifest:
    return WeightManifest(
        run_id="run",
        version=PolicyVersion(0, 2),
        base=PolicyVersion(0, 1) if kind is UpdateKind.DELTA else None,
        kind=kind,
        layout_hash=layout_hash(TENSORS),
        tensors=TENSORS,
        buckets=buckets,
        payload_bytes=payload_bytes,
        digest=digest_of(buckets),
    )


def two_parts(kind: UpdateKind = UpdateKind.DELTA) -> tuple[WeightManifest, WeightManifest]:
    top = 2**64 - 1
    return (
        part(bucket(2, 0, 3, 0, top), bucket(0, 0, 6, 30, 5), kind=kind),
        part(bucket(0, 6, 6, 0, 7), bucket(2, 3, 2, 10, 9), kind=kind),
    )


def test_the_parts_of_a_delta_are_laid_end_to_end() -> None:
    merged = merge_manifests(two_parts())
    places = [(held.tensor_index, held.start, held.payload_offset) for held in merged.buckets]
    assert places == [(0, 0, 30), (0, 6, 40), (2, 0, 0), (2, 3, 50)]
    assert merged.payload_bytes == 80
    assert merged.digest == 20  # -1 + 5 + 7 + 9, modulo 2**64


def test_the_parts_of_a_keyframe_share_one_payload() -> None:
    merged = merge_manifests(two_parts(UpdateKind.KEYFRAME))
    assert [held.payload_offset for held in merged.buckets] == [30, 0, 0, 10]
    assert merged.payload_bytes == 40


REPLACEMENTS: dict[str, Callable[[WeightManifest], WeightManifest]] = {
    "run": lambda held: msgspec.structs.replace(held, run_id="other"),
    "version": lambda held: msgspec.structs.replace(held, version=PolicyVersion(0, 3)),
    "base": lambda held: msgspec.structs.replace(held, base=PolicyVersion(0, 0)),
    "kind": lambda held: msgspec.structs.replace(held, kind=UpdateKind.KEYFRAME, base=None),
    "layout": lambda held: msgspec.structs.replace(held, layout_hash=1),
    "tensors": lambda held: msgspec.structs.replace(held, tensors=TENSORS[:1]),
    "digest": lambda held: msgspec.structs.replace(held, digest=held.digest + 1),
    "bounds": lambda held: msgspec.structs.replace(held, payload_bytes=9),
}


@pytest.mark.parametrize("change", REPLACEMENTS.values(), ids=list(REPLACEMENTS))
@pytest.mark.parametrize("rank", [0, 1])
def test_parts_that_disagree_or_are_wrong_in_themselves_are_refused(
    change: Callable[[WeightManifest], WeightManifest], rank: int
) -> None:
    parts = list(two_parts())
    parts[rank] = change(parts[rank])
    with pytest.raises(CorruptUpdateError, match="is refused"):
        merge_manifests(parts)


@pytest.mark.parametrize(
    "buckets, fault",
    [
        ([bucket(0, 0, 12)], "cover 0 of its 5"),
        ([bucket(0, 0, 11), bucket(2, 0, 5)], "cover 11 of its 12"),
        ([bucket(0, 0, 13), bucket(2, 0, 5)], "cover 13 of its 12"),
        ([bucket(0, 0, 6), bucket(0, 5, 7), bucket(2, 0, 5)], "overlap"),
        ([bucket(0, 0, 6), bucket(0, 7, 5), bucket(2, 0, 5)], "gap"),
        ([bucket(0, 0, 12), bucket(2, 0, 5), bucket(3, 0, 1)], "tensor number 3"),
        ([bucket(0, 0, 12), bucket(2, 0, 5), bucket(2, 5, 0)], "0 elements"),
        ([bucket(0, -1, 13), bucket(2, 0, 5)], "overlap"),
    ],
)
def test_every_element_is_covered_exactly_once(buckets: list[WeightBucket], fault: str) -> None:
    with pytest.raises(CorruptUpdateError, match=fault):
        merge_manifests([part(*buckets, payload_bytes=10)])


def test_an_update_without_parts_is_refused() -> None:
    with pytest.raises(CorruptUpdateError, match="without parts"):
        merge_manifests([])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_however_a_state_is_cut_and_dealt_to_ranks_the_whole_is_the_same(data: st.DataObject) -> None:
    buckets: list[WeightBucket] = []
    for index, size in ((0, 12), (2, 5)):
        cuts = sorted({0, size, *data.draw(st.lists(st.integers(1, size - 1), max_size=4))})
        buckets += [bucket(index, a, b - a, 0, a * 31 + b) for a, b in itertools.pairwise(cuts)]
    owner = data.draw(st.lists(st.integers(0, 2), min_size=len(buckets), max_size=len(buckets)))
    parts = [part(*(held for held, rank in zip(buckets, owner, strict=True) if rank == number)) for number in range(3)]
    merged = merge_manifests(parts)
    assert [(held.tensor_index, held.start) for held in merged.buckets] == [(h.tensor_index, h.start) for h in buckets]
    assert merged.digest == digest_of(buckets)
    victim = data.draw(st.integers(0, len(buckets) - 1))
    rest = [held for number, held in enumerate(buckets) if number != victim]
    with pytest.raises(CorruptUpdateError):
        merge_manifests([part(*rest)])
