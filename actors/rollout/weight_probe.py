# pyright: basic
# torch is typed only in part.
"""Which modules the canary probes, on what inputs, and with which random change."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from headrace.actors.rollout.weight_map import WeightMap, bits
from headrace.actors.rollout.weight_regions import Region
from headrace.engine.weights.changes import WeightChange

# Runs one module alone, without any communication, on fixed inputs, in each way that the model uses it; empty where
# there is no way.
RunModule = Callable[[torch.nn.Module], tuple[torch.Tensor, ...]]

# Of each region: its first elements, which an embedding's first ids read, and a sample of the rest.
_FIRST_ELEMENTS = 512
_SAMPLED_ELEMENTS = 2048

_INPUT_ROWS = 3

_UNSIGNED = {2: np.uint16, 4: np.uint32}


def choose_modules(model: torch.nn.Module, weight_map: WeightMap) -> tuple[str, ...]:
    """One module of each kind that has mapped tensors.

    A kind is a type with its quantisation method, shapes and dtypes: what kernels are chosen by.
    """
    chosen: dict[Any, str] = {}
    owners = {m for rs in weight_map.regions.values() for r in rs for m in weight_map.storages[r.storage].modules}
    for path in sorted(owners):
        module = model.get_submodule(path)
        shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters(recurse=False))
        chosen.setdefault((type(module), type(getattr(module, "quant_method", None)), shapes), path)
    return tuple(sorted(chosen.values()))


def names_in(weight_map: WeightMap, modules: Iterable[str]) -> tuple[str, ...]:
    """The mapped tensors that lie in these modules; of tied ones the first name."""
    wanted = frozenset(modules)
    return tuple(
        name
        for name, regions in weight_map.regions.items()
        if name not in weight_map.aliases and any(wanted & weight_map.storages[r.storage].modules for r in regions)
    )


def hidden_tensors(model: torch.nn.Module, modules: Iterable[str] | None) -> dict[str, torch.Tensor]:
    """Parameters, buffers and tensors in plain attributes of these modules (None: of all), by path. No copies."""
    found: dict[str, torch.Tensor] = {}
    wanted = None if modules is None else frozenset(modules)
    for path, module in model.named_modules(remove_duplicate=False):
        if wanted is not None and path not in wanted:
            continue
        for table in (module._parameters, module._buffers, vars(module)):
            for name, value in table.items():
                if isinstance(value, torch.Tensor) and not value.is_meta and value.numel():
                    found[f"{path}.{name}" if path else name] = value.detach()
    return found


def run_plain_module(module: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Run an embedding, or by the shape of its weight a linear layer or a norm, of torch or transformers."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() not in (1, 2):
        return ()
    if isinstance(module, torch.nn.Embedding):
        out = module(first_ids(weight))
    else:
        out = module(probe_input(weight.shape[-1], weight))
    return (out,) if isinstance(out, torch.Tensor) else ()


def probe_input(width: int, like: torch.Tensor) -> torch.Tensor:
    """Fixed rows [3, width] in `like`'s dtype and device, without a zero."""
    row = torch.arange(_INPUT_ROWS * width, dtype=torch.float32).reshape(_INPUT_ROWS, width)
    return (torch.sin(row * 0.7) + 1.5).to(device=like.device, dtype=like.dtype)


def first_ids(weight: torch.Tensor) -> torch.Tensor:
    """The first rows of an embedding, int64 [n]."""
    return torch.arange(min(_INPUT_ROWS, weight.shape[0]), device=weight.device)


def random_change(name: str, weight_map: WeightMap, base: torch.Tensor, generator: np.random.Generator) -> WeightChange:
    """Turn the sign of some elements that this model holds; a zero becomes one. Any product shows it."""
    positions = np.unique(np.concatenate([_positions(region, generator) for region in weight_map.regions[name]]))
    flat = base.reshape(-1)[torch.from_numpy(positions)].clone()
    values = torch.where(flat == 0, torch.ones_like(flat), -flat)
    return WeightChange(name=name, positions=positions, values=unsigned(values))


def dense_change(name: str, base: torch.Tensor) -> WeightChange:
    """Turn the sign of all elements."""
    return WeightChange(name=name, values=unsigned(torch.where(base == 0, torch.ones_like(base), -base).reshape(-1)))


def changed_tensor(change: WeightChange, base: torch.Tensor) -> torch.Tensor:
    """The whole tensor with a change of positions in it."""
    flat = base.reshape(-1).clone()
    bits(flat)[torch.from_numpy(change.positions)] = torch.from_numpy(change.values.view(f"i{change.values.itemsize}"))
    return flat.reshape(base.shape)


def unsigned(tensor: torch.Tensor) -> Any:
    """The bits of a contiguous CPU tensor as numpy's uint16 or uint32."""
    return bits(tensor).numpy().view(_UNSIGNED[tensor.element_size()])


def _positions(region: Region, generator: np.random.Generator) -> np.ndarray:
    count = region.num_elements
    first = np.arange(min(count, _FIRST_ELEMENTS))
    numbers = np.unique(np.concatenate([first, generator.integers(0, count, min(count, _SAMPLED_ELEMENTS))]))
    found = np.full(len(numbers), region.source_offset, np.int64)
    # The first elements of the *model's* side: rows of an embedding, however the checkpoint is cut.
    dims = sorted(zip(region.target_stride, region.source_stride, region.size, strict=True))
    for _, source, extent in dims:
        numbers, coordinate = np.divmod(numbers, extent)
        found += coordinate * source
    return found
