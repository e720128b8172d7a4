# pyright: basic
# torch is typed only in part.
"""After a scatter the model is, bit for bit, one that loaded the new checkpoint; what fails is taken back."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.rollout.loader_trace import trace_loader, trace_names
from headrace.actors.rollout.weight_map import bits, build_weight_map
from headrace.actors.rollout.weight_scatter import WeightScatter
from headrace.actors.rollout.weight_shadow import OpaqueShadow
from headrace.engine.errors import CorruptUpdateError, RunError, WeightUpdateError
from headrace.engine.weights.changes import WeightChange


def attach(fake: Any, model: Any, tensors: Any, *, shadow: bool = True) -> WeightScatter:
    trace = trace_loader(model, model.load_weights, fake.LAYOUT)
    found = build_weight_map(model, trace, fake.LAYOUT, tensors.__getitem__)
    if not shadow:
        return WeightScatter(found)
    kept = OpaqueShadow.from_checkpoint(found, tensors.__getitem__, lambda weights: model.load_weights(weights.items()))
    return WeightScatter(found, kept)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_many_updates_and_a_revert_give_the_state_of_a_fresh_load(fake: Any, rank: int, ranks: int) -> None:
    tensors = fake.checkpoint(0)
    model = fake.loaded(tensors, rank, ranks)
    scatter = attach(fake, model, tensors)
    for seed in range(1, 9):
        new = fake.perturbed(tensors, seed)
        staged = scatter.stage(fake.difference(tensors, new))
        assert fake.same_state(model, fake.loaded(tensors, rank, ranks))
        scatter.apply(staged)
        assert fake.same_state(model, fake.loaded(new, rank, ranks))
        if seed % 3 == 0:
            scatter.undo(staged)
            assert fake.same_state(model, fake.loaded(tensors, rank, ranks))
        else:
            tensors = new


@pytest.mark.parametrize("size", [7, 64, 1000])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_dense_ranges_of_any_size_do_the_same(fake: Any, size: int, rank: int, ranks: int) -> None:
    old, new = fake.checkpoint(0), fake.checkpoint(1)
    model = fake.loaded(old, rank, ranks)
    scatter = attach(fake, model, old)
    changes = []
    for name, value in new.items():
        flat = bits(value).reshape(-1).numpy().view(np.uint16)
        changes += [
            WeightChange(name=name, start=start, values=flat[start : start + size])
            for start in range(0, len(flat), size)
        ]
    staged = scatter.stage(changes)
    scatter.apply(staged)
    assert fake.same_state(model, fake.loaded(new, rank, ranks))
    scatter.undo(staged)
    assert fake.same_state(model, fake.loaded(old, rank, ranks))


def test_odd_bits_arrive_as_they_were_sent(fake: Any) -> None:
    tensors = fake.checkpoint(0)
    model = fake.loaded(tensors)
    odd = np.array([0x7FC1, 0xFF81, 0x8000, 0x0001], np.uint16)
    change = WeightChange(name="o.weight", positions=np.array([0, 9, 10, 63], np.int64), values=odd)
    scatter = attach(fake, model, tensors)
    scatter.apply(scatter.stage([change]))
    served = model.o.weight.data.reshape(-1)[[0, 9, 10, 63]]
    assert served.view(torch.int16).numpy().view(np.uint16).tolist() == odd.tolist()


def test_a_module_of_transformers_kind_takes_the_same_update(fake: Any) -> None:
    tensors = fake.checkpoint(0)
    layout = {name: fake.LAYOUT[name] for name in ("o.weight", "norm.weight")}
    model = fake.loaded(tensors)
    found = build_weight_map(model, trace_names(model, layout), layout, tensors.__getitem__)
    scatter = WeightScatter(found)
    new = fake.perturbed(tensors, 5)
    names = {"o.weight", "norm.weight"}
    scatter.apply(scatter.stage([c for c in fake.difference(tensors, new) if c.name in names]))
    assert fake.same_state(model, fake.loaded({**tensors, **{name: new[name] for name in names}}))


def test_a_tied_tensor_is_written_once_whichever_name_comes(fake: Any) -> None:
    model = fake.loaded(fake.checkpoint(0))
    layout = {name: ((16, 8), torch.bfloat16) for name in ("embed.weight", "head.weight")}
    found = build_weight_map(model, trace_names(model, layout), layout, lambda name: model.embed.weight.data)
    scatter = WeightScatter(found)
    one = [WeightChange(name="head.weight", positions=np.array([3], np.int32), values=np.array([0x4000], np.uint16))]
    both = [*one, WeightChange(name="embed.weight", positions=one[0].positions, values=one[0].values)]
    assert scatter.stage(one).num_elements == scatter.stage(both).num_elements == 1
    scatter.apply(scatter.stage(one))
    assert model.embed.weight.data.reshape(-1)[3] == 2.0


def test_an_opaque_tensor_goes_through_its_shadow_and_only_it_is_loaded(fake: Any) -> None:
    tensors = fake.checkpoint(0)
    model = fake.loaded(tensors)
    scatter = attach(fake, model, tensors)
    new = fake.perturbed(tensors, 2)
    loads = model.num_loads
    scatter.apply(scatter.stage([c for c in fake.difference(tensors, new) if c.name != "scale"]))
    assert model.num_loads == loads
    staged = scatter.stage([c for c in fake.difference(tensors, new) if c.name == "scale"])
    scatter.apply(staged)
    assert model.num_loads == loads + 1
    assert fake.same_state(model, fake.loaded(new))
    scatter.undo(staged)
    assert fake.same_state(model, fake.loaded({**new, "scale": tensors["scale"]}))


def test_without_a_shadow_a_change_of_an_opaque_tensor_is_refused(fake: Any) -> None:
    tensors = fake.checkpoint(0)
    scatter = attach(fake, fake.loaded(tensors), tensors, shadow=False)
    change = WeightChange(name="scale", positions=np.array([0], np.int32), values=np.array([1], np.uint16))
    with pytest.raises(WeightUpdateError, match="'scale' cannot be changed in place \\(computed"):
        scatter.stage([change])


def change(name: str, positions: list[int], *, width: type = np.uint16, extra: int = 0) -> WeightChange:
    return WeightChange(
        name=name, positions=np.array(positions, np.int64), values=np.zeros(len(positions) + extra, width)
    )


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (change("nowhere", [0]), "does not have"),
        (change("o.weight", [0, 0]), "increase strictly"),
        (change("o.weight", [5, 2]), "increase strictly"),
        (change("o.weight", [64]), r"lie in \[0, 64\)"),
        (change("o.weight", [-1]), r"lie in \[0, 64\)"),
        (change("o.weight", [1, 2], extra=1), "2 positions for 3 values"),
        (change("o.weight", [1], width=np.uint32), "not of the width"),
        (WeightChange(name="o.weight", values=np.zeros(65, np.uint16)), "covers"),
        (WeightChange(name="o.weight", start=-1, values=np.zeros(5, np.uint16)), "covers"),
    ],
)
def test_a_change_that_does_not_fit_is_refused_and_nothing_moves(fake: Any, bad: WeightChange, message: str) -> None:
    tensors = fake.checkpoint(0)
    model = fake.loaded(tensors)
    scatter = attach(fake, model, tensors)
    with pytest.raises(CorruptUpdateError, match=message):
        scatter.stage([change("q.weight", [1, 2]), bad])
    assert fake.same_state(model, fake.loaded(tensors))


def test_a_staged_update_that_was_overtaken_is_refused(fake: Any) -> None:
    tensors = fake.checkpoint(0)
    model = fake.loaded(tensors)
    scatter = attach(fake, model, tensors)
    late, first = scatter.stage([change("q.weight", [1])]), scatter.stage([change("q.weight", [2])])
    scatter.apply(first)
    with pytest.raises(WeightUpdateError, match="stage it again"):
        scatter.apply(late)
    scatter.undo(first)
    with pytest.raises(WeightUpdateError, match="stage it again"):
        scatter.undo(first)
    assert fake.same_state(model, fake.loaded(tensors))


def test_a_store_that_fails_half_way_is_taken_back(fake: Any) -> None:
    tensors = fake.checkpoint(0)
    model = fake.loaded(tensors)
    scatter = attach(fake, model, tensors)
    staged = scatter.stage(fake.difference(tensors, fake.perturbed(tensors, 3)))
    # The last write turns out to be impossible: one value is missing.
    staged.writes[-1] = dataclasses.replace(staged.writes[-1], values=staged.writes[-1].values[:1])
    with pytest.raises(WeightUpdateError, match="was taken back"):
        scatter.apply(staged)
    assert fake.same_state(model, fake.loaded(tensors))


def test_a_reload_that_fails_is_taken_back_with_all_that_was_scattered(fake: Any) -> None:
    tensors = fake.checkpoint(0)
    model = fake.loaded(tensors)
    scatter = attach(fake, model, tensors)
    new = fake.perturbed(tensors, 4)
    load = model.load_weights
    failures = [RuntimeError("no memory for the load")]

    def fails_once(weights: Any) -> Any:
        if failures:
            raise failures.pop()
        return load(weights)

    model.load_weights = fails_once
    staged = scatter.stage(fake.difference(tensors, new))
    with pytest.raises(WeightUpdateError, match="was taken back: no memory for the load"):
        scatter.apply(staged)
    assert fake.same_state(model, fake.loaded(tensors))
    scatter.apply(staged)
    assert fake.same_state(model, fake.loaded(new))


def test_where_taking_back_fails_too_the_error_says_that_nothing_may_be_served(fake: Any) -> None:
    tensors = fake.checkpoint(0)
    model = fake.loaded(tensors)
    scatter = attach(fake, model, tensors)
    staged = scatter.stage(fake.difference(tensors, fake.perturbed(tensors, 4)))
    model.fail_on = "scale"
    with pytest.raises(RunError, match="could not be taken back") as raised:
        scatter.apply(staged)
    assert not isinstance(raised.value, WeightUpdateError)
