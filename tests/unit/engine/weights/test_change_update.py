"""Only a change file that says what its manifest says, of the state that is served, is opened."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.engine.errors import CorruptUpdateError, UnknownLayoutError, WeightUpdateError, WrongBaseError
from headrace.engine.testing.delta_samples import damaged_copy, flipped_signs, make_change_update, make_keyframe
from headrace.engine.testing.plain_weights import PLAIN_TENSORS, PlainSender, as_update
from headrace.engine.types import AckStatus, PolicyVersion, WeightUpdate
from headrace.engine.weights.change_update import ServedState, open_change_update, refusal_status

V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)


@pytest.fixture
def base(tmp_path: Path) -> WeightUpdate:
    return as_update(PlainSender(0).part(V1, tmp_path))


@pytest.fixture
def delta(base: WeightUpdate, tmp_path: Path) -> WeightUpdate:
    return make_change_update(base, flipped_signs(PlainSender(0).state), V2, tmp_path / "delta")


def served_by(base: WeightUpdate, version: PolicyVersion = V1) -> ServedState:
    return ServedState(version=version, digest=base.manifest.digest, layout_hash=base.manifest.layout_hash)


def test_a_change_of_what_is_served_is_opened(base: WeightUpdate, delta: WeightUpdate) -> None:
    changes = open_change_update(delta, served_by(base))
    assert [change.name for change in changes] == [spec.name for spec in PLAIN_TENSORS]
    new = flipped_signs(PlainSender(0).state)
    for change, bits in zip(changes, new, strict=True):
        np.testing.assert_array_equal(change.values, bits if change.positions is None else bits[change.positions])


def test_a_delta_comes_only_after_a_full_update_of_the_same_version_and_tensors(
    base: WeightUpdate, delta: WeightUpdate
) -> None:
    with pytest.raises(WrongBaseError, match="no full update is served yet"):
        open_change_update(delta, ServedState(version=V1))
    with pytest.raises(WrongBaseError, match="the receiver holds 2"):
        open_change_update(delta, served_by(base, V2))
    with pytest.raises(UnknownLayoutError, match="other tensors"):
        open_change_update(delta, ServedState(version=V1, digest=1, layout_hash=1))


@pytest.mark.parametrize(
    "lie", [{"digest": 1}, {"version": PolicyVersion(0, 3)}, {"run_id": "another"}, {"base": PolicyVersion(0, 0)}]
)
def test_a_file_that_its_manifest_does_not_mean_is_refused(
    base: WeightUpdate, delta: WeightUpdate, lie: dict[str, object]
) -> None:
    manifest = msgspec.structs.replace(delta.manifest, **lie)
    state = served_by(base, manifest.base or V1)
    with pytest.raises(CorruptUpdateError, match="leads from 1 to 2 of run 'run'"):
        open_change_update(msgspec.structs.replace(delta, manifest=manifest), state)


def test_a_damaged_or_missing_file_is_refused(base: WeightUpdate, delta: WeightUpdate, tmp_path: Path) -> None:
    with pytest.raises(CorruptUpdateError, match="damaged"):
        open_change_update(damaged_copy(delta, tmp_path / "damaged"), served_by(base))
    Path(delta.local_path).unlink()
    with pytest.raises(CorruptUpdateError, match="cannot be mapped"):
        open_change_update(delta, served_by(base))


def test_the_delta_and_the_keyframe_of_one_state_have_one_digest(
    base: WeightUpdate, delta: WeightUpdate, tmp_path: Path
) -> None:
    full = make_keyframe(base, flipped_signs(PlainSender(0).state), V2, tmp_path / "full")
    assert full.manifest.digest == delta.manifest.digest != base.manifest.digest


def test_each_finding_has_its_answer() -> None:
    answers = {
        WrongBaseError: AckStatus.WRONG_BASE,
        UnknownLayoutError: AckStatus.UNKNOWN_LAYOUT,
        CorruptUpdateError: AckStatus.CORRUPT,
        WeightUpdateError: AckStatus.FAILED,
    }
    assert {kind: refusal_status(kind("")) for kind in answers} == answers
