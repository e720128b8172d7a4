"""Several ranks of a sharded model publish: the deltas lead to the keyframe of each version, bit for bit."""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from headrace.actors.tiny import build_tiny_model
from headrace.engine.types import UpdateKind, WeightManifest, WeightPart, WeightUpdate
from headrace.engine.weights.delta import apply_change, decode_bucket, encoded_bucket
from headrace.engine.weights.manifest import merge_manifests
from headrace.engine.weights.payload import open_payload, verify_payload

RANK = Path(__file__).with_name("weight_rank.py")

State = dict[str, npt.NDArray[np.uint16 | np.uint32]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks of all scenarios wrote."""
    model_dir = build_tiny_model(tmp_path_factory.mktemp("model"), "llama", tied=True)
    folder = tmp_path_factory.mktemp("published")
    done = subprocess.run(
        [sys.executable, str(RANK), str(model_dir), str(folder)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return folder


def parts(folder: Path, kind: str, version: int) -> list[WeightPart]:
    found = sorted((folder / kind).glob(f"{version}-*.json"))
    return [msgspec.json.decode(path.read_bytes(), type=WeightPart) for path in found]


def keyframe(found: list[WeightPart]) -> tuple[WeightManifest, State]:
    manifest = merge_manifests([part.manifest for part in found])
    update = WeightUpdate(manifest=manifest, local_path=found[0].local_path)
    verify_payload(update)
    return manifest, {name: bits.reshape(-1).copy() for name, (_, bits) in open_payload(update).items()}


def apply(state: State, found: list[WeightPart]) -> WeightManifest:
    manifest = merge_manifests([part.manifest for part in found])
    payload = memoryview(b"".join(Path(part.local_path).read_bytes() for part in found))
    for bucket in manifest.buckets:
        target = state[manifest.tensors[bucket.tensor_index].name][bucket.start : bucket.start + bucket.count]
        apply_change(target, decode_bucket(encoded_bucket(bucket, payload), target))
    return manifest


def follow(folder: Path) -> tuple[State, int]:
    """Apply what was sent, version by version, and compare with the keyframes; returns the number of deltas."""
    state: State = {}
    versions = sorted({int(path.name.partition("-")[0]) for path in (folder / "sent").glob("*.json")})
    num_deltas = 0
    for version in versions:
        sent = parts(folder, "sent", version)
        if sent[0].manifest.kind is UpdateKind.KEYFRAME:
            manifest, state = keyframe(sent)
        else:
            manifest, num_deltas = apply(state, sent), num_deltas + 1
        full, awaited = keyframe(parts(folder, "full", version))
        assert manifest.digest == full.digest
        for name, bits in awaited.items():
            assert np.array_equal(state[name], bits), (version, name)
    return state, num_deltas


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ten_deltas_of_sharded_ranks_applied_to_the_first_state_are_the_keyframes(
    published: Path, num_ranks: int
) -> None:
    folder = published / f"ranks-{num_ranks}"
    state, num_deltas = follow(folder)
    assert num_deltas == 10
    assert "lm_head.weight" not in state  # tied, so published once
    sent = parts(folder, "sent", 11)
    assert len(sent) == num_ranks and all(part.num_changed > 0 for part in sent)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", ["two-cuts", "replicas"])
def test_shards_that_are_cut_twice_or_held_twice_are_published_once(published: Path, scenario: str) -> None:
    """That they cover every element exactly once is what joining the parts proves."""
    folder = published / scenario
    state, num_deltas = follow(folder)
    assert num_deltas >= 1
    whole = msgspec.json.decode((folder / "whole.json").read_bytes(), type=dict[str, list[int]])
    assert state.keys() == whole.keys()
    for name, bits in whole.items():
        assert np.array_equal(state[name].view(np.int16), np.array(bits, np.int16)), name
