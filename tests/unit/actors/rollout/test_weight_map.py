# pyright: basic
# torch is typed only in part.
"""Regions are believed only where the model holds the checkpoint's bits, and positions translate element by element."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headrace.actors.rollout.loader_trace import trace_loader, trace_names
from headrace.actors.rollout.weight_map import CheckpointTensors, build_weight_map, remap
from headrace.actors.rollout.weight_regions import Region
from headrace.engine.errors import ConfigError


def mapped(fake: Any, model: Any, tensors: Any, **options: Any) -> Any:
    trace = trace_loader(model, model.load_weights, fake.LAYOUT)
    return build_weight_map(model, trace, fake.LAYOUT, tensors.__getitem__, **options)


def test_every_name_is_mapped_opaque_or_absent_and_only_once(fake: Any) -> None:
    tensors = fake.checkpoint(0)
    found = mapped(fake, fake.loaded(tensors), tensors)
    assert set(found.regions) | set(found.opaque) | found.absent == set(fake.LAYOUT)
    assert set(found.opaque) == {"scale"}
    assert found.groups == {"scale": {"scaled"}}
    assert found.summary() == (
        "8 tensors in place, 1 by reload (computed by its loader (aten.copy_.default)), 1 not here"
    )


def test_a_tensor_that_changed_after_loading_is_opaque_and_takes_its_module_with_it(fake: Any) -> None:
    tensors = fake.checkpoint(0)
    model = fake.loaded(tensors)
    # As a kernel might that wants its weights in another order.
    model.qkv.weight.data[:8] = model.qkv.weight.data[:8].flip(0)
    found = mapped(fake, model, tensors)
    assert found.opaque["q.weight"] == "the model holds other values than the checkpoint"
    assert "cannot be written in place" in found.opaque["k.weight"]
    assert "cannot be written in place" in found.opaque["v.weight"]
    assert "gate.weight" in found.regions


def test_verification_looks_at_bits_not_values(fake: Any) -> None:
    tensors = fake.checkpoint(0)
    tensors["o.weight"][0, 0] = float("nan")
    tensors["up.weight"][0, 0] = 0.0
    model = fake.loaded(tensors)
    assert "o.weight" in mapped(fake, model, tensors).regions
    model.gate_up.weight.data[fake.WIDE, 0] = -0.0
    assert "up.weight" in mapped(fake, model, tensors).opaque


def test_modules_that_the_caller_knows_to_be_packed_are_opaque(fake: Any) -> None:
    tensors = fake.checkpoint(0)
    model = fake.loaded(tensors)
    found = mapped(fake, model, tensors, opaque_module=lambda path, module: "packed" if path == "head" else "")
    assert found.opaque["embed.weight"] == "packed"


def test_tied_names_are_aliases_and_shared_places_are_refused(fake: Any) -> None:
    model = fake.loaded(fake.checkpoint(0))
    layout = {name: ((16, 8), torch.bfloat16) for name in ("embed.weight", "head.weight")}
    trace = trace_names(model, layout)
    found = build_weight_map(model, trace, layout, lambda name: model.embed.weight.data)
    assert found.aliases == {"head.weight": "embed.weight"}

    def load(weights: Any) -> None:
        for name, value in weights:
            model.embed.weight.data[: 12 if name == "a" else None][-12:].copy_(value)

    small = {name: ((12, 8), torch.bfloat16) for name in ("a", "b")}
    base = model.embed.weight.data
    both = build_weight_map(
        model, trace_loader(model, load, small), small, lambda name: base[:12] if name == "a" else base[4:]
    )
    assert set(both.opaque) == {"a", "b"}
    assert "lie in one range" in both.opaque["a"], both.opaque


def test_a_checkpoint_folder_gives_tensors_by_name_and_says_what_is_missing(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3, dtype=torch.float32)}, tmp_path / "one.safetensors")
    save_file(
        {"b": torch.ones(2, dtype=torch.bfloat16), "n": torch.ones(1, dtype=torch.int64)}, tmp_path / "two.safetensors"
    )
    read = CheckpointTensors(tmp_path)
    assert read.layout() == {
        "a": ((2, 3), torch.float32),
        "b": ((2,), torch.bfloat16),
        "n": ((1,), torch.int64),
    }
    assert read.layout(torch.bfloat16)["a"] == ((2, 3), torch.bfloat16)
    assert read("b").dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="no tensor 'c'"):
        read("c")
    with pytest.raises(ConfigError, match=r"holds no \.safetensors file"):
        CheckpointTensors(tmp_path / "none")


@st.composite
def slices(draw: Any) -> tuple[tuple[int, ...], Any, tuple[int, ...]]:
    """A checkpoint shape, a view of it, and an order of the view's dimensions in the model."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    view = []
    for n in shape:
        low = draw(st.integers(0, n - 1))
        high = draw(st.integers(low + 1, n))
        view.append(slice(low, high, draw(st.sampled_from([1, 1, 2]))))
    return shape, tuple(view), tuple(draw(st.permutations(range(len(shape)))))


@settings(max_examples=150, deadline=None)
@given(slices(), st.randoms(use_true_random=False))
def test_positions_translate_as_a_copy_of_the_view_would(case: Any, random: Any) -> None:
    shape, view, order = case
    total = torch.Size(shape).numel()
    numbered = torch.arange(1, total + 1, dtype=torch.float32).reshape(shape)
    part = numbered[view].permute(order)
    model: Any = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(*[n + 1 for n in part.shape]), requires_grad=False)
    inner = tuple(slice(1, None) for _ in part.shape)

    def load(weights: Any) -> None:
        for _, value in weights:
            model.w.data[inner].copy_(value[view].permute(order))

    regions = trace_loader(model, load, {"w": (shape, torch.float32)}).regions["w"]
    expected = torch.zeros_like(model.w)
    expected[inner] = part
    positions = torch.tensor(sorted(random.sample(range(total), random.randint(1, total))))
    keep = torch.isin(expected, positions.float() + 1)
    found = torch.zeros(expected.numel())
    for _, index, select in remap(regions, positions):
        found[index] = positions[select].float() + 1
    assert torch.equal(found.reshape(expected.shape), torch.where(keep, expected, 0))


def test_no_positions_translate_to_nothing() -> None:
    region = Region(storage=0, source_offset=0, target_offset=0, size=(4,), source_stride=(1,), target_stride=(1,))
    assert list(remap((region,), torch.empty(0, dtype=torch.int64))) == []
    assert list(remap((region,), torch.tensor([7, 9]))) == []
