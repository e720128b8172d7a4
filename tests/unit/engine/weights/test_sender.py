"""One rank's parts: the image, and deltas that lead to the keyframe bit for bit."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from headrace.engine.errors import StorageError
from headrace.engine.types import BucketEncoding, PolicyVersion, TensorSpec, UpdateKind, WeightPart, WeightUpdate
from headrace.engine.weights.delta import apply_change, decode_bucket, encoded_bucket
from headrace.engine.weights.digest import state_digest
from headrace.engine.weights.manifest import merge_manifests
from headrace.engine.weights.payload import open_payload, verify_payload
from headrace.engine.weights.sender import HostBits, Shard, StagedPart, WeightSender

TENSORS = (
    TensorSpec(name="a", dtype="bfloat16", shape=(40, 30)),
    TensorSpec(name="b", dtype="float32", shape=(70,)),
)
State = dict[str, npt.NDArray[np.uint16 | np.uint32]]
# Of rank 0 and 1: tensor a is cut along its second dimension, b along its first.
RUNS: tuple[tuple[tuple[tuple[int, int], ...], ...], ...] = (
    (tuple((row * 30, 13) for row in range(40)), ((0, 50),)),
    (tuple((row * 30 + 13, 17) for row in range(40)), ((50, 20),)),
)
WHOLE = (((0, 1200),), ((0, 70),))


def at(version: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion(incarnation, version)


def first_state(seed: int = 0) -> State:
    rng = np.random.default_rng(seed)
    return {"a": rng.integers(0, 1 << 16, 1200, np.uint16), "b": rng.integers(0, 1 << 32, 70, np.uint32)}


def moved(state: State, seed: int, share: float = 0.05) -> State:
    rng = np.random.default_rng(seed)
    return {name: bits + (rng.random(len(bits)) < share).astype(bits.dtype) for name, bits in state.items()}


def shards(state: State, runs: Sequence[Sequence[tuple[int, int]]] = WHOLE) -> list[Shard[npt.NDArray[np.generic]]]:
    return [
        Shard(
            tensor_index=index,
            runs=tuple(own),
            elements=np.concatenate([bits[start : start + count] for start, count in own]),
        )
        for index, (own, bits) in enumerate(zip(runs, state.values(), strict=True))
    ]


def make(rank: int = 0, keyframe_steps: int = 25) -> "WeightSender[npt.NDArray[np.uint16 | np.uint32]]":
    return WeightSender(TENSORS, run_id="r", rank=rank, keyframe_steps=keyframe_steps, bits=HostBits())


def stage(
    sender: "WeightSender[npt.NDArray[np.uint16 | np.uint32]]",
    version: int,
    state: State,
    since: int | None,
    runs: Sequence[Sequence[tuple[int, int]]] = WHOLE,
) -> "StagedPart[npt.NDArray[np.uint16 | np.uint32]]":
    full = sender.needs_keyframe(at(version), None if since is None else at(since))
    return sender.stage(at(version), shards(state, runs), full=full)  # type: ignore[arg-type]


def applied(base: State, parts: Sequence[WeightPart]) -> State:
    """The state that a delta of all ranks leads to, and its digest is checked to be the manifest's."""
    manifest = merge_manifests([part.manifest for part in parts])
    payload = memoryview(b"".join(Path(part.local_path).read_bytes() for part in parts))
    state = {name: bits.copy() for name, bits in base.items()}
    for bucket in manifest.buckets:
        target = state[manifest.tensors[bucket.tensor_index].name][bucket.start : bucket.start + bucket.count]
        apply_change(target, decode_bucket(encoded_bucket(bucket, payload), target))
    return state


def keyframe(parts: Sequence[WeightPart]) -> State:
    manifest = merge_manifests([part.manifest for part in parts])
    update = WeightUpdate(manifest=manifest, local_path=parts[0].local_path)
    verify_payload(update)
    return {name: bits.reshape(-1).copy() for name, (_, bits) in open_payload(update).items()}


def assert_equal(found: State, awaited: State) -> None:
    for name, bits in awaited.items():
        assert np.array_equal(found[name], bits), name


def test_ten_deltas_of_two_ranks_with_cut_rows_lead_to_the_keyframe_bit_for_bit(tmp_path: Path) -> None:
    senders = [make(rank, keyframe_steps=100) for rank in (0, 1)]
    num_deltas = 0
    state = first_state()
    followed: State = {}
    for version in range(1, 11):
        since = None if version == 1 else at(version - 1)
        full = any([sender.needs_keyframe(at(version), since) for sender in senders])  # the ranks agree
        staged = [sender.stage(at(version), shards(state, RUNS[sender.rank]), full=full) for sender in senders]  # type: ignore[arg-type]
        parts = [part.write(tmp_path) for part in staged]
        followed = keyframe(parts) if full else applied(followed, parts)
        assert_equal(followed, state)
        whole = [part.write(tmp_path, full=True) for part in staged]
        assert merge_manifests([part.manifest for part in whole]).digest == sum(
            part.manifest.digest for part in parts
        ) % (1 << 64)
        for part in staged:
            part.write(tmp_path)
            part.settle(accepted=True)
        num_deltas += not full
        state = moved(state, version)
    assert num_deltas >= 3  # many tiny buckets weigh nearly as much as a keyframe


def test_buckets_are_cut_at_the_borders_of_shards_and_tell_how_much_changed(tmp_path: Path) -> None:
    sender, state = make(), first_state()
    one = stage(sender, 1, state, None, RUNS[0])
    manifest = one.write(tmp_path).manifest
    assert len(manifest.buckets) == 41
    one.settle(accepted=True)
    changed = {name: bits.copy() for name, bits in state.items()}
    changed["a"][[3, 12, 13, 29]] += 1  # two of them are the other rank's
    part = stage(sender, 2, changed, 1, RUNS[0]).write(tmp_path)
    assert part.num_changed == 2 and part.encode_s > 0
    assert [bucket.start for bucket in part.manifest.buckets if bucket.encoding is not BucketEncoding.SAME] == [0]


def test_a_refused_part_leaves_the_image_and_the_next_update_is_full(tmp_path: Path) -> None:
    sender, state = make(), first_state()
    one = stage(sender, 1, state, None)
    one.write(tmp_path)
    one.settle(accepted=True)
    image = sender.base_of(shards(state)[0])  # type: ignore[arg-type]
    two = stage(sender, 2, moved(state, 1), 1)
    assert two.write(tmp_path).manifest.kind is UpdateKind.DELTA
    two.settle(accepted=False)
    assert sender.base_of(shards(state)[0]) is image  # type: ignore[arg-type]
    three = stage(sender, 3, moved(state, 2), 2).write(tmp_path)
    assert three.manifest.kind is UpdateKind.KEYFRAME
    assert_equal(keyframe([three]), moved(state, 2))


def test_the_next_calls_since_says_what_became_of_an_update(tmp_path: Path) -> None:
    sender, state = make(), first_state()
    stage(sender, 1, state, None).write(tmp_path)
    two = stage(sender, 2, moved(state, 1), 1).write(tmp_path)
    assert two.manifest.base == at(1)
    # Version 2 was not taken: its changes are no base, and neither is version 1, of which nobody knows.
    assert stage(sender, 3, moved(state, 2), 1).write(tmp_path).manifest.base is None


def test_a_refused_delta_can_be_written_in_full_and_is_the_base_of_the_next(tmp_path: Path) -> None:
    sender, state = make(), first_state()
    stage(sender, 1, state, None).write(tmp_path)
    second = moved(state, 1)
    two = stage(sender, 2, second, 1)
    assert two.write(tmp_path).manifest.kind is UpdateKind.DELTA
    assert two.write(tmp_path, full=True).manifest.kind is UpdateKind.KEYFRAME
    two.settle(accepted=True)
    third = moved(second, 2)
    part = stage(sender, 3, third, 2).write(tmp_path)
    assert part.manifest.base == at(2)
    assert_equal(applied(second, [part]), third)


def test_an_update_that_finds_no_room_can_be_written_elsewhere(tmp_path: Path) -> None:
    sender, state = make(), first_state()
    stage(sender, 1, state, None).write(tmp_path)
    staged = stage(sender, 2, moved(state, 1), 1)
    with pytest.raises(StorageError):
        staged.write(tmp_path / "absent")
    assert_equal(applied(state, [staged.write(tmp_path)]), moved(state, 1))


def test_a_rank_that_publishes_nothing_has_an_empty_part(tmp_path: Path) -> None:
    state = first_state()
    owner, replica = make(0), make(1)
    stage(owner, 1, state, None).write(tmp_path)
    replica.stage(at(1), [], full=True).write(tmp_path)
    parts = [stage(owner, 2, moved(state, 1), 1).write(tmp_path)]
    assert not replica.needs_keyframe(at(2), at(1))
    parts.append(replica.stage(at(2), [], full=False).write(tmp_path))
    assert parts[1].manifest.payload_bytes == 0 and Path(parts[1].local_path).exists()
    assert_equal(applied(state, parts), moved(state, 1))


def test_after_a_restart_from_other_weights_the_next_update_is_full(tmp_path: Path) -> None:
    sender, state = make(), first_state()
    stage(sender, 1, state, None).write(tmp_path)
    sender.reset()
    assert sender.needs_keyframe(at(2), at(1))
    assert sender.needs_keyframe(at(2, 1), at(1))


def test_float32_weights_that_nearly_all_change_are_sent_whole_and_let_go_of(tmp_path: Path) -> None:
    """Looking for what did not change would take a hundred times longer than to send all."""
    rng = np.random.default_rng(3)
    tensors = (TensorSpec(name="w", dtype="float32", shape=(50_000,)),)
    sender = WeightSender(tensors, run_id="r", rank=0, keyframe_steps=4, bits=HostBits())
    state = rng.standard_normal(50_000).astype(np.float32).view(np.uint32)
    kinds: list[bool] = []
    for number in range(1, 7):
        version = PolicyVersion(0, number)
        since = PolicyVersion(0, number - 1) if number > 1 else None
        full = sender.needs_keyframe(version, since)
        part = sender.stage(version, [Shard(tensor_index=0, runs=((0, 50_000),), elements=state)], full=full)
        written = part.write(tmp_path)
        part.settle(accepted=True)
        kinds.append(full)
        if not full:
            (bucket,) = written.manifest.buckets
            assert bucket.encoding is BucketEncoding.DENSE
            assert written.manifest.digest == state_digest(0, 0, state)
            assert written.num_changed == pytest.approx(50_000, rel=0.02)
            assert not sender._image
        state = (state.view(np.float32) * np.float32(1.001)).view(np.uint32)
    assert kinds == [True, False, True, True, True, False]
