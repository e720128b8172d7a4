# pyright: basic
# torch is typed only in part.
"""Tracing a loader finds where each element goes, changes nothing, and names what it cannot follow."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from headrace.actors.rollout.loader_trace import trace_loader, trace_names
from headrace.actors.rollout.weight_map import bits
from headrace.actors.rollout.weight_regions import merge_dimensions

Weights = Iterable[tuple[str, torch.Tensor]]


def linear(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    module: Any = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(rows, columns, dtype=dtype), requires_grad=False)
    return module


def traced(write: Any, *, rows: int = 4, columns: int = 6, shape: tuple[int, ...] = (4, 6)) -> Any:
    """Trace a loader that does `write(parameter, checkpoint_tensor)` for one tensor `w`."""
    model = linear(rows, columns)

    def load(weights: Weights) -> None:
        for _, value in weights:
            write(model.weight, value)

    found = trace_loader(model, load, {"w": (shape, torch.bfloat16)})
    assert torch.equal(model.weight, torch.zeros(rows, columns, dtype=torch.bfloat16))
    return found


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_fused_sliced_and_cast_tensors_are_mapped_and_the_model_is_not_touched(
    fake: Any, rank: int, ranks: int
) -> None:
    model = fake.loaded(fake.checkpoint(0), rank, ranks)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = trace_loader(model, model.load_weights, fake.LAYOUT)
    assert set(found.regions) == set(fake.LAYOUT) - {"scale", "head.weight"}
    assert found.absent == {"head.weight"}
    assert "computed" in found.opaque["scale"]
    assert found.touched["scale"] == {"scaled"}
    assert all(torch.equal(bits(before[name]), bits(value)) for name, value in model.state_dict().items())
    names = {storage.name for storage in found.storages}
    assert names == {"embed.weight", "qkv.weight", "o.weight", "gate_up.weight", "norm.weight", "scaled.weight"}


def test_a_column_slice_is_one_strided_region(fake: Any) -> None:
    model = fake.loaded(fake.checkpoint(0), 1, 2)
    (region,) = trace_loader(model, model.load_weights, fake.LAYOUT).regions["o.weight"]
    assert (region.size, region.source_offset, region.source_stride, region.target_stride) == (
        (8, 4),
        4,
        (8, 1),
        (4, 1),
    )
    assert region.num_elements == 32
    assert region.source_span == 60


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda p, w: p.data.copy_(w * 2), "computed"),
        (lambda p, w: p.data.copy_(torch.cat([w[2:], w[:2]])), "computed"),
        (lambda p, w: p.data.add_(w), "computed"),
        (lambda p, w: p.data.copy_(w[:1]), "broadcast"),
        (lambda p, w: p.data.copy_(w.view(torch.float16)), "reinterpreted"),
        (lambda p, w: p.data.copy_(w.neg_()), "changes it first"),
        (lambda p, w: p.data.copy_(w.to(torch.float32)), "computed"),
        (lambda p, w: p.data.fill_(w.sum().item()), "fails without bytes"),
        (lambda p, w: p.data.view(torch.float16).copy_(w), "view of another dtype"),
        (lambda p, w: p.data.copy_(torch.empty_like(w).copy_(w)), "computed"),
    ],
)
def test_what_is_not_a_plain_copy_is_opaque_with_the_reason(write: Any, reason: str) -> None:
    found = traced(write)
    assert reason in found.opaque["w"]
    assert not found.regions


@pytest.mark.parametrize(
    "write",
    [
        lambda p, w: p.data.copy_(w),
        lambda p, w: p.data.copy_(w.clone()),
        lambda p, w: p.data.copy_(w.to(device="cpu")),
        lambda p, w: p.data.copy_(w.contiguous().view(2, 12).reshape(4, 6)),
        lambda p, w: [p.data[row].copy_(w[row]) for row in range(4)],
        lambda p, w: p.data.__setitem__(slice(None), w),
    ],
)
def test_views_moves_and_clones_are_followed(write: Any) -> None:
    found = traced(write)
    assert sum(region.num_elements for region in found.regions["w"]) == 24
    assert not found.opaque


def test_a_transposed_copy_is_mapped_with_its_strides() -> None:
    found = traced(lambda p, w: p.data.copy_(w.t()), shape=(6, 4))
    (region,) = found.regions["w"]
    assert (region.size, region.source_stride, region.target_stride) == ((6, 4), (4, 1), (1, 6))


def test_a_loader_that_replaces_its_parameter_leaves_the_old_one_and_the_name_is_opaque() -> None:
    model = linear(4, 6)
    kept = model.weight

    def load(weights: Weights) -> None:
        for name, value in weights:
            if name == "w":
                model.weight = torch.nn.Parameter(value, requires_grad=False)
            else:
                model.weight.data.copy_(value)

    layout = {"w": ((4, 6), torch.bfloat16), "x": ((4, 6), torch.bfloat16)}
    found = trace_loader(model, load, layout)
    assert model.weight is kept
    assert found.opaque == {"w": "its loader replaces parameters"}
    assert set(found.regions) == {"x"}


def test_one_name_that_fails_does_not_spoil_the_others(fake: Any) -> None:
    model = fake.loaded(fake.checkpoint(0))
    model.fail_on = "k.weight"
    found = trace_loader(model, model.load_weights, fake.LAYOUT)
    assert "k.weight is not loaded today" in found.opaque["k.weight"]
    assert {"q.weight", "v.weight", "norm.weight"} <= set(found.regions)


def test_a_module_with_the_checkpoints_names_needs_no_loader(fake: Any) -> None:
    model = fake.loaded(fake.checkpoint(0))
    layout = {
        "embed.weight": ((16, 8), torch.bfloat16),
        "head.weight": ((16, 8), torch.bfloat16),
        "norm.weight": ((8,), torch.bfloat16),
        "o.weight": ((8, 4), torch.bfloat16),
        "nowhere": ((2,), torch.bfloat16),
    }
    found = trace_names(model, layout)
    assert found.regions["embed.weight"] == found.regions["head.weight"]
    assert found.opaque == {"o.weight": "the parameter has the shape (8, 8)", "nowhere": "no parameter has this name"}
    assert model.num_loads == 1


def test_dimensions_merge_where_both_sides_run_on_and_interleaved_sources_have_none() -> None:
    assert merge_dimensions((2, 3, 4), (12, 4, 1), (12, 4, 1)) == ((24,), (1,), (1,))
    assert merge_dimensions((2, 3, 4), (20, 4, 1), (12, 4, 1)) == ((2, 12), (20, 1), (12, 1))
    assert merge_dimensions((1, 1), (5, 5), (5, 5)) == ((1,), (1,), (1,))
    assert merge_dimensions((3, 3), (2, 1), (3, 1)) is None
    assert merge_dimensions((3, 3), (3, 0), (3, 1)) is None
