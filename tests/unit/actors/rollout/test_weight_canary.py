# pyright: basic
# torch is typed only in part.
"""The canary passes models that compute with their parameters, refuses all others, and leaves each as it was."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch

from headrace.actors.rollout.loader_trace import trace_loader, trace_names
from headrace.actors.rollout.weight_canary import check_reload, check_scatter
from headrace.actors.rollout.weight_map import build_weight_map
from headrace.actors.rollout.weight_probe import choose_modules, random_change, run_plain_module
from headrace.actors.rollout.weight_shadow import OpaqueShadow
from headrace.engine.errors import WeightUpdateError


class PackedLinear(torch.nn.Linear):
    """Computes with a copy that `pack` made, as a kernel does that wants its own layout."""

    def pack(self) -> None:
        packed = self.weight.detach().clone()
        self.compute: Callable[[torch.Tensor], torch.Tensor] = lambda x: torch.nn.functional.linear(x, packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x)


class DerivedLinear(torch.nn.Linear):
    """Keeps a derived tensor beside its weight and computes with the weight."""

    def pack(self) -> None:
        self.derived = self.weight.detach().sum(0)


class Model(torch.nn.Module):
    """Layers of one kind with a loader that packs after loading."""

    def __init__(self, kind: type[torch.nn.Linear]) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 8)
        self.layers = torch.nn.ModuleList([kind(8, 8, bias=False) for _ in range(3)])
        self.norm = torch.nn.RMSNorm(8)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters: dict[str, Any] = dict(self.named_parameters())
        for name, value in weights:
            parameters[name].data.copy_(value)

    def reload(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.load(weights.items())
        layers: list[Any] = list(self.layers)
        for layer in layers:
            if hasattr(layer, "pack"):
                layer.pack()


def base() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(value.shape, generator=generator)
        for name, value in Model(torch.nn.Linear).state_dict().items()
    }
    # Where weights start at nothing, a turned sign would show nothing.
    tensors["norm.weight"] = torch.zeros(8)
    return tensors


def checked(model: Model, *, run: Any = run_plain_module) -> tuple[str, ...]:
    tensors = base()
    model.reload(tensors)
    layout = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    found = build_weight_map(model, trace_loader(model, model.load, layout), layout, tensors.__getitem__)
    assert not found.opaque
    try:
        return check_scatter(model, found, tensors.__getitem__, run=run, reload=model.reload)
    finally:
        assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())


def test_a_model_that_computes_with_its_parameters_passes_one_of_each_kind() -> None:
    assert checked(Model(torch.nn.Linear)) == ("embed", "layers.0", "norm")


def test_packed_weights_are_refused_and_the_packed_copy_is_as_before() -> None:
    model = Model(PackedLinear)
    with pytest.raises(WeightUpdateError, match=r"layers\.0 \(PackedLinear\) answers the same"):
        checked(model)
    x = torch.ones(1, 8)
    assert torch.equal(model.layers[0](x), torch.nn.functional.linear(x, base()["layers.0.weight"]))


def test_a_derived_copy_that_only_a_load_renews_is_refused() -> None:
    with pytest.raises(WeightUpdateError, match=r"layers\.0\.derived is another after a load"):
        checked(Model(DerivedLinear))


def test_a_loader_that_disagrees_with_what_it_was_traced_to_do_is_refused() -> None:
    model = Model(torch.nn.Linear)
    load = model.load
    model.reload = lambda weights: load(
        (name, value if len(value) != 6 else value.flip(0)) for name, value in weights.items()
    )
    tensors = base()
    load(tensors.items())
    layout = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    found = build_weight_map(model, trace_loader(model, load, layout), layout, tensors.__getitem__)
    with pytest.raises(WeightUpdateError, match=r"embed\.weight is another"):
        check_scatter(model, found, tensors.__getitem__, run=run_plain_module, reload=model.reload)
    assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())


def test_a_reload_that_raises_leaves_the_model_as_it_was() -> None:
    model = Model(torch.nn.Linear)
    tensors = base()
    model.reload(tensors)
    layout = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    found = build_weight_map(model, trace_loader(model, model.load, layout), layout, tensors.__getitem__)

    def breaks(weights: Mapping[str, torch.Tensor]) -> None:
        model.norm.weight = torch.nn.Parameter(torch.ones(8))
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        check_scatter(model, found, tensors.__getitem__, run=run_plain_module, reload=breaks)
    assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())


def test_a_random_change_reaches_the_first_rows_of_each_region(fake: Any) -> None:
    import numpy as np

    tensors = fake.checkpoint(0)
    model = fake.loaded(tensors, 1, 2)
    trace = trace_loader(model, model.load_weights, fake.LAYOUT)
    found = build_weight_map(model, trace, fake.LAYOUT, tensors.__getitem__)
    change: Any = random_change("o.weight", found, tensors["o.weight"], np.random.default_rng(0))
    # This rank holds columns 4 to 7 of eight rows: all of them are few enough to be the first elements.
    assert change.positions.tolist() == [row * 8 + column for row in range(8) for column in range(4, 8)]
    assert choose_modules(model, found)


class Experts(torch.nn.Module):
    """Stores its two weights as one, computed by its loader."""

    def __init__(self, *, spoils: bool = False, deaf: bool = False) -> None:
        super().__init__()
        self.both = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.spoils, self.deaf = spoils, deaf
        self.num_loads = 0

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        found = dict(weights)
        self.num_loads += 1
        if self.deaf and self.num_loads > 2:
            return
        value = torch.cat([found["a"], found["b"]]) if len(found) == 2 else torch.zeros(4, 4)
        self.both.data.copy_(value.flip(0) if self.spoils and self.num_loads > 2 else value)


def shadowed(model: Experts) -> OpaqueShadow:
    tensors = {"a": torch.randn(2, 4), "b": torch.randn(2, 4)}
    layout = {name: ((2, 4), torch.float32) for name in tensors}
    trace = trace_loader(model, model.load, layout)
    model.load(tensors.items())
    found = build_weight_map(model, trace, layout, tensors.__getitem__)
    assert set(found.opaque) == {"a", "b"}
    shadow = OpaqueShadow.from_checkpoint(found, tensors.__getitem__, lambda weights: model.load(weights.items()))
    before = model.both.detach().clone()
    try:
        assert check_reload(model, found, shadow) == ("a",)
    finally:
        assert torch.equal(model.both, before)
        assert all(torch.equal(shadow.tensor(name), value) for name, value in tensors.items())
    return shadow


def test_opaque_tensors_pass_where_loading_a_copy_changes_nothing_and_a_changed_one_something() -> None:
    shadow = shadowed(Experts())
    assert shadow.together({"a"}) == {"a", "b"}


def test_a_model_that_an_identity_load_corrupts_is_refused() -> None:
    with pytest.raises(WeightUpdateError, match="Loading 'a' unchanged changes both"):
        shadowed(Experts(spoils=True))


def test_a_model_that_ignores_a_load_is_refused() -> None:
    with pytest.raises(WeightUpdateError, match="changed 'a' changes nothing"):
        shadowed(Experts(deaf=True))


def test_a_transformers_model_passes_by_its_names() -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).eval()
    tensors = {name: value.detach().clone() for name, value in model.named_parameters()}
    layout = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    found = build_weight_map(model, trace_names(model, layout), layout, tensors.__getitem__)

    def reload(weights: Mapping[str, torch.Tensor]) -> None:
        model.load_state_dict(dict(weights), strict=False)

    run = check_scatter(model, found, tensors.__getitem__, run=run_plain_module, reload=reload)
    assert {"lm_head", "model.embed_tokens", "model.layers.0.self_attn.o_proj"} <= set(run)
