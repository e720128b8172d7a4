"""Full weight updates in a file: layout, writing by several ranks, verification, mapping."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.errors import CorruptUpdateError, FormatError, InputError, StorageError
from headrace.engine.types import BucketEncoding, PolicyVersion, TensorSpec, UpdateKind, WeightManifest, WeightUpdate
from headrace.engine.weights.layout import BUCKET_ELEMENTS, layout_hash, payload_size, tensor_offsets
from headrace.engine.weights.payload import KeyframeWriter, open_payload, verify_payload

VERSION = PolicyVersion(0, 7)
TENSORS = (
    TensorSpec(name="embed", dtype="bfloat16", shape=(5, 3)),
    TensorSpec(name="norm", dtype="float32", shape=(7,)),
    TensorSpec(name="scale", dtype="float16", shape=()),
)


def arrays(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 1 << 16, 15, dtype=np.uint16),
        rng.integers(0, 1 << 32, 7, dtype=np.uint32),
        rng.integers(0, 1 << 16, 1, dtype=np.uint16),
    ]


def keyframe(path: Path, tensors: tuple[TensorSpec, ...] = TENSORS, seed: int = 0) -> WeightUpdate:
    with KeyframeWriter(path, tensors, run_id="run", version=VERSION) as writer:
        for index, array in enumerate(arrays(seed)):
            writer.write(index, 0, array)
        return WeightUpdate(manifest=writer.manifest(), local_path=str(path))


def change(update: WeightUpdate, **fields: object) -> WeightUpdate:
    return msgspec.structs.replace(update, manifest=msgspec.structs.replace(update.manifest, **fields))


def test_what_is_written_is_mapped_back_bit_for_bit(tmp_path: Path) -> None:
    update = keyframe(tmp_path / "k")
    verify_payload(update)
    views = open_payload(update)
    for spec, array in zip(TENSORS, arrays(), strict=True):
        assert views[spec.name][0] == spec
        assert views[spec.name][1].shape == spec.shape
        np.testing.assert_array_equal(views[spec.name][1].reshape(-1), array)


def test_a_mapped_payload_cannot_be_written_and_outlives_its_file(tmp_path: Path) -> None:
    update = keyframe(tmp_path / "k")
    view = open_payload(update)["embed"][1]
    (tmp_path / "k").unlink()
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1
    np.testing.assert_array_equal(view.reshape(-1), arrays()[0])


def test_every_tensor_starts_at_a_multiple_of_64_bytes() -> None:
    assert tensor_offsets(TENSORS) == (0, 64, 128, 192)
    assert payload_size(TENSORS) == 192


def test_the_layout_hash_depends_on_names_dtypes_shapes_and_order() -> None:
    renamed = (msgspec.structs.replace(TENSORS[0], name="embed2"), *TENSORS[1:])
    reshaped = (msgspec.structs.replace(TENSORS[0], shape=(3, 5)), *TENSORS[1:])
    retyped = (msgspec.structs.replace(TENSORS[0], dtype="float16"), *TENSORS[1:])
    assert len({layout_hash(t) for t in (TENSORS, renamed, reshaped, retyped, TENSORS[::-1])}) == 5
    assert layout_hash(TENSORS) == layout_hash(tuple(TENSORS))


def test_ranks_that_share_a_file_write_the_bytes_that_one_rank_would(tmp_path: Path) -> None:
    whole = keyframe(tmp_path / "one")
    first = KeyframeWriter(tmp_path / "two", TENSORS, run_id="run", version=VERSION)
    second = KeyframeWriter(tmp_path / "two", TENSORS, run_id="run", version=VERSION)
    embed, norm, scale = arrays()
    second.write(0, 6, embed[6:])
    first.write(0, 0, embed[:6])
    first.write(1, 0, norm)
    second.write(2, 0, scale)
    parts = (first.manifest(), second.manifest())
    first.close()
    second.close()
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    buckets = tuple(sorted((b for part in parts for b in part.buckets), key=lambda b: (b.tensor_index, b.start)))
    digest = sum(part.digest for part in parts) % 2**64
    verify_payload(
        WeightUpdate(
            manifest=msgspec.structs.replace(whole.manifest, buckets=buckets, digest=digest),
            local_path=str(tmp_path / "two"),
        )
    )


def test_buckets_end_at_multiples_of_the_bucket_size(tmp_path: Path) -> None:
    spec = TensorSpec(name="w", dtype="bfloat16", shape=(BUCKET_ELEMENTS + 10,))
    data = np.arange(BUCKET_ELEMENTS + 10, dtype=np.uint32).astype(np.uint16)
    with KeyframeWriter(tmp_path / "k", (spec,), run_id="run", version=VERSION) as writer:
        writer.write(0, 4, data[4:])
        writer.write(0, 0, data[:4])
        manifest = writer.manifest()
    assert [(b.start, b.count) for b in manifest.buckets] == [(0, 4), (4, BUCKET_ELEMENTS - 4), (BUCKET_ELEMENTS, 10)]
    verify_payload(WeightUpdate(manifest=manifest, local_path=str(tmp_path / "k")))


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (14, 2), (15, 1), (3, 2)])
def test_a_write_outside_the_tensor_or_over_an_earlier_one_is_refused(tmp_path: Path, start: int, count: int) -> None:
    with KeyframeWriter(tmp_path / "k", TENSORS, run_id="run", version=VERSION) as writer:
        writer.write(0, 4, arrays()[0][4:6])
        with pytest.raises(InputError):
            writer.write(0, start, arrays()[0][:count])
        with pytest.raises(InputError, match="whole number"):
            writer.write(1, 0, b"123")
        with pytest.raises(InputError, match="tensors 0 to 2"):
            writer.write(3, 0, b"12")


def test_a_file_of_another_layout_is_not_joined(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(bytes(1000))
    with pytest.raises(StorageError, match="another path"):
        KeyframeWriter(tmp_path / "k", TENSORS, run_id="run", version=VERSION)


def test_a_full_disk_shows_when_the_file_is_opened_and_leaves_nothing_behind(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    too_much = room.f_blocks * room.f_frsize * 2
    spec = TensorSpec(name="w", dtype="float32", shape=(too_much // 4,))
    with pytest.raises(StorageError, match=r"Reserving \d+ bytes for .*/k"):
        KeyframeWriter(tmp_path / "k", (spec,), run_id="run", version=VERSION)
    assert not (tmp_path / "k").exists()


def test_a_missing_folder_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=os.strerror(errno.ENOENT)):
        KeyframeWriter(tmp_path / "no" / "k", TENSORS, run_id="run", version=VERSION)


Fault = Callable[[WeightManifest], dict[str, object]]


def first_bucket(**fields: object) -> Fault:
    def apply(manifest: WeightManifest) -> dict[str, object]:
        return {"buckets": (msgspec.structs.replace(manifest.buckets[0], **fields), *manifest.buckets[1:])}

    return apply


FAULTS: dict[str, Fault] = {
    "a missing bucket": lambda m: {"buckets": m.buckets[1:]},
    "a bucket twice": lambda m: {"buckets": (*m.buckets, m.buckets[0])},
    "an absent tensor": first_bucket(tensor_index=9),
    "a negative tensor": first_bucket(tensor_index=-1),
    "an offset past the end": first_bucket(payload_offset=1 << 63),
    "an offset elsewhere": first_bucket(payload_offset=2),
    "a count that would wrap": first_bucket(count=(1 << 64) - 1),
    "a start that would wrap": first_bucket(start=(1 << 64) - 15),
    "an empty bucket": first_bucket(count=0),
    "another encoding": first_bucket(encoding=BucketEncoding.GAP_VALUE),
    "another payload checksum": first_bucket(payload_checksum=1),
    "another state checksum": first_bucket(state_checksum=1),
    "another digest": lambda m: {"digest": m.digest ^ 1},
    "another size": lambda m: {"payload_bytes": m.payload_bytes + 64},
    "another layout hash": lambda m: {"layout_hash": m.layout_hash ^ 1},
    "a delta": lambda m: {"kind": UpdateKind.DELTA, "base": PolicyVersion(0, 6)},
    "a shape that would wrap": lambda m: {
        "tensors": (TensorSpec(name="embed", dtype="bfloat16", shape=(1 << 32, 1 << 33)), *m.tensors[1:])
    },
    "a negative dimension": lambda m: {
        "tensors": (TensorSpec(name="embed", dtype="bfloat16", shape=(-5, -3)), *m.tensors[1:])
    },
    "an unknown dtype": lambda m: {"tensors": (TensorSpec(name="embed", dtype="object", shape=(5, 3)), *m.tensors[1:])},
    "a name twice": lambda m: {"tensors": (m.tensors[0], m.tensors[0], m.tensors[2])},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_manifest_with_a_fault_is_refused(tmp_path: Path, fault: str) -> None:
    update = keyframe(tmp_path / "k")
    with pytest.raises(CorruptUpdateError):
        verify_payload(change(update, **FAULTS[fault](update.manifest)))


@given(position=st.integers(0, 29), bit=st.integers(0, 7))
def test_every_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, position: int, bit: int) -> None:
    path = tmp_path_factory.mktemp("flip") / "k"
    update = keyframe(path)
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(CorruptUpdateError, match="damaged"):
        verify_payload(update)


def test_a_truncated_or_missing_file_is_refused_before_it_is_mapped(tmp_path: Path) -> None:
    update = keyframe(tmp_path / "k")
    os.truncate(tmp_path / "k", 100)
    with pytest.raises(CorruptUpdateError, match="100 bytes"):
        open_payload(update)
    (tmp_path / "k").unlink()
    with pytest.raises(CorruptUpdateError, match=os.strerror(errno.ENOENT)):
        verify_payload(update)


def test_equal_tensors_that_change_places_change_the_digest(tmp_path: Path) -> None:
    specs = tuple(TensorSpec(name=name, dtype="bfloat16", shape=(4,)) for name in "ab")
    digests = []
    for order in ((0, 1), (1, 0)):
        with KeyframeWriter(tmp_path / f"k{order[0]}", specs, run_id="run", version=VERSION) as writer:
            for index in range(2):
                writer.write(index, 0, np.full(4, order[index], np.uint16))
            digests.append(writer.manifest().digest)
    assert digests[0] != digests[1]


def test_an_empty_tensor_needs_no_bucket(tmp_path: Path) -> None:
    spec = TensorSpec(name="none", dtype="float32", shape=(0, 4))
    with KeyframeWriter(tmp_path / "k", (spec,), run_id="run", version=VERSION) as writer:
        writer.write(0, 0, b"")
        update = WeightUpdate(manifest=writer.manifest(), local_path=str(tmp_path / "k"))
    verify_payload(update)
    assert open_payload(update)["none"][1].shape == (0, 4)


def test_a_writer_refuses_what_a_payload_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="int64"):
        KeyframeWriter(
            tmp_path / "k", (TensorSpec(name="w", dtype="int64", shape=(1,)),), run_id="run", version=VERSION
        )
