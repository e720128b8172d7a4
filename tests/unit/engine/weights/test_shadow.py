"""The host's copy is at one version, bit for bit, whatever comes in whatever order; what is refused changes nothing."""

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import CorruptUpdateError, HeadraceError, WeightUpdateError, WrongBaseError
from headrace.engine.testing.plain_weights import (
    PLAIN_TENSORS,
    PlainReceiver,
    PlainSender,
    as_update,
    digest_of_state,
    with_manifest,
)
from headrace.engine.types import AckStatus, PolicyVersion, TensorSpec, WeightUpdate
from headrace.engine.weights.keyframe import KeyframeWriter
from headrace.engine.weights.layout import BUCKET_ELEMENTS
from headrace.engine.weights.shadow import Shadow


def version(number: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion(incarnation, number)


def state_of(shadow: Shadow) -> list[list[int]]:
    return [shadow.read(index, 0, 1 << 20).tolist() for index in range(len(shadow.tensors))]


def expected(sender: PlainSender) -> list[list[int]]:
    return [array.tolist() for array in sender.state]


def published(sender: PlainSender, number: int, folder: Path, *, full: bool = False) -> WeightUpdate:
    part = sender.part(version(number), folder, full=full)
    sender.settle(accepted=True)
    return as_update(part)


@given(
    seed=st.integers(0, 1 << 16),
    order=st.lists(st.integers(0, 7), max_size=24),
    full=st.sets(st.integers(1, 7), max_size=3),
    damage=st.sets(st.integers(0, 23), max_size=8),
    held=st.sampled_from([0, 64, 1 << 20]),
)
@settings(max_examples=40, deadline=None)
def test_updates_in_any_order_leave_a_whole_version_and_never_a_mixture(
    tmp_path_factory: pytest.TempPathFactory, seed: int, order: list[int], full: set[int], damage: set[int], held: int
) -> None:
    folder = tmp_path_factory.mktemp("updates")
    sender, updates, states = PlainSender(seed), [], []
    for number in range(8):
        updates.append(published(sender, number, folder, full=number in full))
        states.append(expected(sender))
        sender.step()
    shadow = Shadow(folder / "shadow", held_bytes=held)
    for place, number in enumerate(order):
        update, before = updates[number], shadow.version
        if place in damage:
            update = damaged(update, place, folder)
        try:
            shadow.apply(update)
        except HeadraceError:
            assert shadow.version == before
        else:
            assert shadow.version == version(number)
        if shadow.version is None:
            continue
        assert state_of(shadow) == states[shadow.version.version]
        assert shadow.digest == digest_of_state(
            [np.array(s, a.dtype) for s, a in zip(states[shadow.version.version], sender.state, strict=True)]
        )
    for update in updates:
        if update.manifest.base is None or update.manifest.base == shadow.version:
            shadow.apply(update)
    assert state_of(shadow) == states[7]
    shadow.close()


def damaged(update: WeightUpdate, place: int, folder: Path) -> WeightUpdate:
    """The same update with a bit flipped, or cut short."""
    data = bytearray(Path(update.local_path).read_bytes())
    if place % 2 and data:
        data[(place * 37) % len(data)] ^= 1 << place % 8
    else:
        del data[len(data) - 1 - place % 5 :]
    path = folder / f"damaged-{place}"
    path.write_bytes(data)
    return msgspec.structs.replace(update, local_path=str(path))


def test_the_elements_that_changed_are_told_whether_by_delta_or_by_keyframe(tmp_path: Path) -> None:
    sender, shadow = PlainSender(1), Shadow(tmp_path / "shadow")
    assert shadow.apply(published(sender, 0, tmp_path)) is None
    for number, full in ((1, False), (2, True)):
        before = expected(sender)
        sender.step()
        touched = shadow.apply(published(sender, number, tmp_path, full=full))
        assert touched is not None
        found = {
            (one.tensor_index, one.start + int(at))
            for one in touched
            for at in (range(one.count) if one.positions is None else one.positions)
        }
        after = expected(sender)
        differs = {(t, p) for t in range(len(after)) for p in range(len(after[t])) if after[t][p] != before[t][p]}
        assert differs <= found
        assert not full or differs == found


def test_a_keyframe_of_another_incarnation_or_layout_makes_the_past_useless(tmp_path: Path) -> None:
    sender, shadow = PlainSender(1), Shadow(tmp_path / "shadow")
    shadow.apply(published(sender, 5, tmp_path))
    resumed = PlainSender(2)
    assert shadow.apply(as_update(resumed.part(version(3, incarnation=1), tmp_path))) is None
    assert state_of(shadow) == expected(resumed)
    other = PlainSender(3, (TensorSpec(name="x", dtype="float32", shape=(5,)),))
    assert shadow.apply(as_update(other.part(version(4, incarnation=1), tmp_path))) is None
    assert state_of(shadow) == expected(other)


def test_a_delta_of_another_run_layout_or_base_is_refused(tmp_path: Path) -> None:
    sender, shadow = PlainSender(1), Shadow(tmp_path / "shadow")
    first = published(sender, 0, tmp_path)
    sender.step()
    delta = published(sender, 1, tmp_path)
    with pytest.raises(WrongBaseError, match="holds nothing"):
        shadow.apply(delta)
    shadow.apply(first)
    with pytest.raises(WrongBaseError, match="another run"):
        shadow.apply(with_manifest(delta, run_id="other"))
    with pytest.raises(WrongBaseError, match="starts from version"):
        shadow.apply(with_manifest(delta, base=version(7)))
    assert state_of(shadow) != expected(sender)
    shadow.apply(delta)
    assert state_of(shadow) == expected(sender)


def test_a_delta_whose_base_differs_where_nothing_changed_is_refused_by_the_digest(tmp_path: Path) -> None:
    sender, twin, shadow = PlainSender(1), PlainSender(1), Shadow(tmp_path / "shadow")
    (tmp_path / "twin").mkdir()
    published(sender, 0, tmp_path)
    twin.state[1][-1] ^= np.uint32(1)
    shadow.apply(published(twin, 0, tmp_path / "twin"))
    sender.state[0][3] ^= np.uint16(1)
    with pytest.raises(WrongBaseError, match="would have the digest"):
        shadow.apply(published(sender, 1, tmp_path))
    assert state_of(shadow) == expected(twin)


def test_a_bucket_that_crosses_the_cut_is_refused(tmp_path: Path) -> None:
    tensors = (TensorSpec(name="x", dtype="bfloat16", shape=(BUCKET_ELEMENTS + 8,)),)
    sender, shadow = PlainSender(1, tensors), Shadow(tmp_path / "shadow")
    update = published(sender, 0, tmp_path)
    one, two = update.manifest.buckets
    buckets = (
        msgspec.structs.replace(one, count=8, payload_bytes=16),
        msgspec.structs.replace(two, start=8, count=BUCKET_ELEMENTS, payload_offset=16),
    )
    with pytest.raises(CorruptUpdateError):
        shadow.apply(with_manifest(update, buckets=buckets))
    assert shadow.version is None


def test_a_state_that_is_written_out_is_what_a_receiver_takes_as_a_keyframe(tmp_path: Path) -> None:
    sender, shadow = PlainSender(1), Shadow(tmp_path / "shadow")
    with pytest.raises(WeightUpdateError, match="no state yet"):
        shadow.write_keyframe(tmp_path / "whole")
    shadow.apply(published(sender, 0, tmp_path))
    sender.step()
    shadow.apply(published(sender, 1, tmp_path))
    update = shadow.write_keyframe(tmp_path / "whole")
    sender.step()
    shadow.apply(published(sender, 2, tmp_path))  # what was written does not move with the copy
    receiver = PlainReceiver(version(0))
    assert receiver.take(update).status is AckStatus.SERVING
    assert receiver.version == version(1)


def test_an_audit_finds_a_damaged_copy(tmp_path: Path) -> None:
    sender, shadow = PlainSender(1), Shadow(tmp_path / "shadow")
    shadow.audit()
    shadow.apply(published(sender, 0, tmp_path))
    shadow.audit()
    shadow.read(1, 5, 1)[0] ^= 1
    with pytest.raises(CorruptUpdateError, match="given up"):
        shadow.audit()
    assert shadow.version is None


def test_a_copy_that_was_damaged_is_found_and_given_up(tmp_path: Path) -> None:
    sender, shadow = PlainSender(1), Shadow(tmp_path / "shadow")
    shadow.apply(published(sender, 0, tmp_path))
    shadow.read(0, 0, 1)[0] ^= 1
    with pytest.raises(CorruptUpdateError, match="given up"):
        shadow.write_keyframe(tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    with pytest.raises(WeightUpdateError):
        shadow.read(0, 0, 1)
    sender.step()
    with pytest.raises(WrongBaseError):
        shadow.apply(published(sender, 1, tmp_path))
    shadow.apply(published(sender, 2, tmp_path, full=True))
    assert state_of(shadow) == expected(sender)


def test_a_copy_is_removed_with_its_owner(tmp_path: Path) -> None:
    sender, shadow = PlainSender(1), Shadow(tmp_path / "shadow")
    shadow.apply(published(sender, 0, tmp_path))
    assert shadow.num_bytes == os.path.getsize(tmp_path / "shadow") > 0
    shadow.close()
    shadow.close()
    assert not (tmp_path / "shadow").exists()
    assert shadow.tensors == PLAIN_TENSORS


def test_a_whole_state_of_which_most_is_new_is_not_told_element_by_element(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    tensors = (TensorSpec(name="w", dtype="float32", shape=(30_000,)),)
    first = rng.standard_normal(30_000).astype(np.float32)
    some, most = first.copy(), first.copy()
    some[:3_000] += 1
    most[:15_000] += 1
    for changed, told in ((some, True), (most, False)):
        shadow = Shadow(tmp_path / "shadow.bin")
        touched = None
        for version, state in enumerate((first, changed), 1):
            path = tmp_path / f"{told}-{version}.bin"
            with KeyframeWriter(path, tensors, run_id="r", version=PolicyVersion(0, version)) as writer:
                writer.write(0, 0, state.view(np.uint32))
                touched = shadow.apply(WeightUpdate(manifest=writer.manifest(), local_path=str(path)))
        assert (touched is not None) is told
        assert np.array_equal(shadow.read(0, 0, 30_000), changed.view(np.uint32))
        shadow.close()
