"""A module that took deltas is, bit for bit, one that loaded the whole state."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.actors.rollout.transformers_weights import ModuleWeights
from headrace.engine.errors import CorruptUpdateError, UnknownLayoutError, WeightUpdateError, WrongBaseError
from headrace.engine.testing.delta_samples import flipped_signs, make_change_update, make_keyframe, state_of
from headrace.engine.types import PolicyVersion, TensorSpec, WeightUpdate
from headrace.engine.weights.change_update import ServedState
from headrace.engine.weights.changes import WeightChange, write_changes
from headrace.engine.weights.payload import KeyframeWriter


class Tied(torch.nn.Module):
    """An embedding that is the head, too, and a norm."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(12, 4, dtype=dtype)
        self.norm = torch.nn.LayerNorm(4, dtype=dtype)
        self.head = torch.nn.Linear(4, 12, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight


def full_update(folder: Path, dtype: str = "float32") -> WeightUpdate:
    shapes = {"embed.weight": (12, 4), "norm.weight": (4,), "norm.bias": (4,)}
    specs = [TensorSpec(name=name, dtype=dtype, shape=shape) for name, shape in shapes.items()]
    rng = np.random.default_rng(0)
    with KeyframeWriter(folder / "base", specs, run_id="run", version=PolicyVersion(0, 1)) as writer:
        for index, spec in enumerate(specs):
            values = torch.from_numpy(rng.standard_normal(spec.shape)).to(getattr(torch, dtype))
            bits = values.view(torch.int32 if dtype == "float32" else torch.int16).numpy()
            writer.write(index, 0, bits.view(f"u{bits.itemsize}"))
        return WeightUpdate(manifest=writer.manifest(), local_path=str(folder / "base"))


def served_by(update: WeightUpdate) -> ServedState:
    manifest = update.manifest
    return ServedState(version=manifest.version, digest=manifest.digest, layout_hash=manifest.layout_hash)


def load(weights: ModuleWeights, update: WeightUpdate) -> None:
    assert weights.stage(update, ServedState(version=PolicyVersion(0, 0))) is None
    weights.load(update)


def state(model: torch.nn.Module) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("served", "published"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.float32, "bfloat16")]
)
def test_a_delta_gives_the_module_that_a_full_update_gives(tmp_path: Path, served: torch.dtype, published: str) -> None:
    model, other = Tied(served), Tied(served)
    weights, whole = ModuleWeights(model), ModuleWeights(other)
    base = full_update(tmp_path, published)
    load(weights, base)
    before = state(model)
    new = flipped_signs(state_of(base))
    delta = make_change_update(base, new, PolicyVersion(0, 2), tmp_path / "delta")
    staged = weights.stage(delta, served_by(base))
    assert staged is not None
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)
    weights.apply(staged)
    load(whole, make_keyframe(base, new, PolicyVersion(0, 2), tmp_path / "full"))
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
        assert not torch.equal(before[name], value)
    assert model.head.weight is model.embed.weight


def test_a_delta_that_was_staged_before_another_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model = Tied(torch.float32)
    weights = ModuleWeights(model)
    base = full_update(tmp_path)
    load(weights, base)
    new = flipped_signs(state_of(base))
    delta = make_change_update(base, new, PolicyVersion(0, 2), tmp_path / "delta")
    first, second = weights.stage(delta, served_by(base)), weights.stage(delta, served_by(base))
    assert first is not None
    assert second is not None
    weights.apply(first)
    before = state(model)
    with pytest.raises(WeightUpdateError, match="stage it again"):
        weights.apply(second)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_what_does_not_fit_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    weights = ModuleWeights(Tied(torch.float32))
    base = full_update(tmp_path)
    delta = make_change_update(base, state_of(base), PolicyVersion(0, 2), tmp_path / "delta")
    with pytest.raises(WrongBaseError, match="no full update is served yet"):
        weights.stage(delta, ServedState(version=PolicyVersion(0, 1)))
    load(weights, base)
    tensors = tuple(msgspec.structs.replace(spec, name=f"x.{spec.name}") for spec in base.manifest.tensors)
    with KeyframeWriter(tmp_path / "other", tensors, run_id="run", version=PolicyVersion(0, 2)) as writer:
        for index, bits in enumerate(state_of(base)):
            writer.write(index, 0, bits)
        other = WeightUpdate(manifest=writer.manifest(), local_path=str(tmp_path / "other"))
    with pytest.raises(UnknownLayoutError, match="It lacks 3 of 3 tensors"):
        weights.stage(other, served_by(base))
    outside = WeightChange(name="norm.weight", positions=np.array([4], np.int32), values=np.zeros(1, np.uint32))
    made = write_changes(
        tmp_path / "outside",
        [outside],
        digest=7,
        run_id="run",
        base=PolicyVersion(0, 1),
        version=PolicyVersion(0, 2),
    )
    manifest = msgspec.structs.replace(delta.manifest, digest=7)
    with pytest.raises(CorruptUpdateError, match=r"lie in \[0, 4\)"):
        weights.stage(WeightUpdate(manifest=manifest, local_path=made.path), served_by(base))
