"""A fetch converges whatever happens to the frames, asks for whole buckets only, and never for one that has arrived."""

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import CorruptUpdateError
from headrace.engine.types import BucketEncoding, PolicyVersion, UpdateKind, WeightBucket, WeightManifest
from headrace.engine.weights.bucket_fetch import BucketFetch

FRAME = 4
PAYLOAD = bytes(range(7, 47))
SIZES = (10, 0, 3, 16, 11)

Frame = tuple[int, int, bytes]


def manifest(payload: bytes = PAYLOAD, sizes: tuple[int, ...] = SIZES) -> WeightManifest:
    buckets: list[WeightBucket] = []
    offset = 0
    for number, size in enumerate(sizes):
        piece = payload[offset : offset + size]
        buckets.append(
            WeightBucket(
                tensor_index=0,
                start=number,
                count=1,
                encoding=BucketEncoding.GAP_ULP,
                payload_offset=offset,
                payload_bytes=size,
                payload_checksum=xxhash.xxh3_64_intdigest(piece),
                state_checksum=0,
            )
        )
        offset += size
    return WeightManifest(
        run_id="run",
        version=PolicyVersion(0, 2),
        base=PolicyVersion(0, 1),
        kind=UpdateKind.DELTA,
        layout_hash=0,
        tensors=(),
        buckets=tuple(buckets),
        payload_bytes=offset,
        digest=0,
    )


def frames(asked: tuple[int, ...]) -> list[Frame]:
    sent: list[Frame] = []
    for index in asked:
        bucket = manifest().buckets[index]
        end = bucket.payload_offset + bucket.payload_bytes
        for offset in range(bucket.payload_offset, end, FRAME):
            sent.append((index, offset, PAYLOAD[offset : min(end, offset + FRAME)]))
    return sent


@given(
    faults=st.lists(
        st.lists(
            st.tuples(
                st.integers(0, 20), st.sampled_from(["drop", "double", "swap", "cut", "damage", "break", "late"])
            ),
            max_size=3,
        ),
        max_size=5,
    )
)
@settings(max_examples=80, deadline=None)
def test_frames_that_are_lost_doubled_swapped_cut_or_damaged_are_fetched_again(
    faults: list[list[tuple[int, str]]],
) -> None:
    fetch, file, arrived = BucketFetch(manifest()), bytearray(len(PAYLOAD)), set[int]()
    late: list[Frame] = []
    for some in [*faults, []]:
        asked = fetch.missing()
        assert not arrived & set(asked)
        sent = frames(asked)
        for place, fault in some:
            sent = spoil(sent, place, fault, late)
        for index, offset, data in sent:
            if fetch.take(index, offset, data):
                file[offset : offset + len(data)] = data
        arrived = set(range(len(SIZES))) - set(fetch.missing())
        for index in arrived:
            bucket = manifest().buckets[index]
            place = slice(bucket.payload_offset, bucket.payload_offset + bucket.payload_bytes)
            assert file[place] == PAYLOAD[place]
    assert fetch.missing() == ()
    assert file == PAYLOAD


def spoil(sent: list[Frame], place: int, fault: str, late: list[Frame]) -> list[Frame]:
    if not sent:
        return list(late)
    place %= len(sent)
    index, offset, data = sent[place]
    match fault:
        case "drop":
            late.append(sent[place])
            return sent[:place] + sent[place + 1 :]
        case "double":
            return [*sent[: place + 1], *sent[place:]]
        case "swap":
            return [*sent[:place], *reversed(sent[place : place + 2]), *sent[place + 2 :]]
        case "cut":
            return [*sent[:place], (index, offset, data[:-1]), *sent[place + 1 :]]
        case "damage":
            return [*sent[:place], (index, offset, bytes([data[0] ^ 1]) + data[1:]), *sent[place + 1 :]]
        case "break":
            return sent[:place]
        case _:
            return [*late, *sent]


def test_a_bucket_without_bytes_is_not_asked_for() -> None:
    assert BucketFetch(manifest()).missing() == (0, 2, 3, 4)
    assert BucketFetch(manifest(b"", (0, 0))).missing() == ()


@pytest.mark.parametrize("frame", [(5, 0, b"x"), (0, 10, b"x"), (0, 8, b"xyz"), (2, 9, b"x"), (-1, 0, b"x")])
def test_a_frame_outside_its_bucket_is_refused(frame: Frame) -> None:
    with pytest.raises(CorruptUpdateError, match="outside of bucket"):
        BucketFetch(manifest()).take(*frame)


def test_a_manifest_whose_bucket_lies_outside_its_payload_is_refused() -> None:
    with pytest.raises(CorruptUpdateError, match="ends at byte"):
        BucketFetch(msgspec.structs.replace(manifest(), payload_bytes=39))
