# pyright: basic
# torch and safetensors are typed only in part.
"""The proven map from checkpoint elements to places in a running model.

A trace says where a loader would write. Here each of its regions is compared, bit for bit, with the checkpoint that
the model was loaded from; what does not agree (a layout that changed after loading, a derived value) is opaque.

Invariants:
- Mapped names were verified; opaque names carry a reason; absent names have no place here. Every name is one of these.
- No element of the model belongs to two mapped names, except where one name is an alias of another: the same tensor
  under two names (tied). An alias is written only where its original is not in the update.
- A module with an opaque tensor is opaque altogether: it can then be reloaded as one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from headrace.actors.rollout.loader_trace import Trace
from headrace.actors.rollout.weight_regions import ModelStorage, Region, TensorLayout
from headrace.engine.errors import ConfigError

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Why the tensors of a module (path, module) cannot be written in place, or nothing.
OpaqueModule = Callable[[str, torch.nn.Module], str]
# Reads one tensor of the checkpoint that the model was loaded from, whole.
ReadTensor = Callable[[str], torch.Tensor]
Select = slice | torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMap:
    """Where each checkpoint tensor lies in one model.

    Attributes:
        layout: Shape and dtype of each tensor as updates name it.
        regions: Of each mapped name.
        opaque: The reason, by name.
        aliases: From a mapped name to the earlier one that has the same regions.
        absent: Names without a place here.
        groups: The modules that each opaque name is written to, as far as known; empty where unknown.
    """

    storages: tuple[ModelStorage, ...]
    layout: TensorLayout
    regions: Mapping[str, tuple[Region, ...]]
    opaque: Mapping[str, str]
    aliases: Mapping[str, str]
    absent: frozenset[str]
    groups: Mapping[str, frozenset[str]]

    def summary(self) -> str:
        """One line for a log: how many names are mapped, and the first reasons why others are not."""
        reasons = sorted(set(self.opaque.values()))
        more = f" ({'; '.join(reasons[:3])})" if reasons else ""
        return f"{len(self.regions)} tensors in place, {len(self.opaque)} by reload{more}, {len(self.absent)} not here"


class CheckpointTensors:
    """Reads tensors of a folder's safetensors files by name. Opens each file once; use as a context manager."""

    def __init__(self, folder: Path) -> None:
        """Open the folder.

        Raises:
            ConfigError: It holds no safetensors file.
        """
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ConfigError(f"{folder} holds no .safetensors file to compare the served weights with.")
        self._files: list[Any] = []
        self._by_name: dict[str, Any] = {}
        for path in paths:
            file: Any = safe_open(path, framework="pt")
            self._files.append(file)
            self._by_name.update(dict.fromkeys(file.keys(), file))

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU.

        Raises:
            ConfigError: No file has it.
        """
        if name not in self._by_name:
            raise ConfigError(f"The checkpoint has no tensor {name!r}; updates must name its own tensors.")
        tensor: torch.Tensor = self._by_name[name].get_tensor(name)
        return tensor

    def layout(self, dtype: torch.dtype | None = None) -> TensorLayout:
        """Shape and dtype of each tensor, from the headers; floats as `dtype`, where updates come in another."""
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, file in self._by_name.items():
            piece = file.get_slice(name)
            own = getattr(torch, _SAFETENSORS_TYPES.get(piece.get_dtype(), "uint8"))
            found[name] = (tuple(piece.get_shape()), dtype if dtype is not None and own.is_floating_point else own)
        return found


_SAFETENSORS_TYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: a NaN equals itself, -0.0 is not 0.0, and every kernel can move it."""
    return tensor.view(_BITS[tensor.element_size()])


def build_weight_map(
    model: torch.nn.Module,
    trace: Trace,
    layout: TensorLayout,
    read: ReadTensor,
    *,
    opaque_module: OpaqueModule = lambda path, module: "",
) -> WeightMap:
    """Verify a trace against the checkpoint. Reads each mapped tensor once, from disk; blocks meanwhile.

    The model must hold that checkpoint's weights, unchanged.

    Args:
        model: What was traced.
        trace: Of its loader, over `layout`.
        layout: What updates name, in the dtypes in which they come.
        read: The checkpoint's tensors.
        opaque_module: Names modules that compute with something else than their parameters (packed or derived copies).
    """
    opaque = dict(trace.opaque)
    touched = {name: set(modules) for name, modules in trace.touched.items()}
    modules_by_path = dict(model.named_modules(remove_duplicate=False))
    reasons = {path: reason for path, module in modules_by_path.items() if (reason := opaque_module(path, module))}
    for name, regions in trace.regions.items():
        modules = set[str]().union(*(trace.storages[region.storage].modules for region in regions))
        touched.setdefault(name, set()).update(modules)
        reason = next((reasons[module] for module in sorted(modules) if module in reasons), "")
        if not reason and not _agrees(trace.storages, regions, read(name).to(layout[name][1])):
            reason = "the model holds other values than the checkpoint"
        if reason:
            opaque.setdefault(name, reason)
    mapped = {name: regions for name, regions in trace.regions.items() if name not in opaque}
    aliases = _aliases(mapped, opaque)
    _close_modules(touched, opaque)
    return WeightMap(
        storages=trace.storages,
        layout=layout,
        regions={name: regions for name, regions in mapped.items() if name not in opaque},
        opaque=opaque,
        aliases={name: original for name, original in aliases.items() if name not in opaque},
        absent=trace.absent,
        groups={name: frozenset(touched.get(name, ())) for name in opaque},
    )


def remap(regions: tuple[Region, ...], positions: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, Select]]:
    """Translate sorted checkpoint positions into places in the model.

    Args:
        regions: Of one tensor; together they need not hold all of it (another rank has the rest).
        positions: int64 [K], strictly increasing; on the device where the result is wanted.

    Yields:
        For each region with any: the storage's index, int64 [k] indices into it, and what selects the same elements
        from `positions`: a slice, or int64 [k].
    """
    if not len(positions):
        return
    bounds = [edge for r in regions for edge in (r.source_offset, r.source_offset + r.source_span)]
    edges = torch.searchsorted(positions, torch.tensor(bounds, dtype=torch.int64, device=positions.device)).tolist()
    for region, low, high in zip(regions, edges[::2], edges[1::2], strict=True):
        if low == high:
            continue
        near = positions[low:high]
        if region.is_run:
            yield region.storage, near + (region.target_offset - region.source_offset), slice(low, high)
            continue
        rest = near - region.source_offset
        target = torch.full_like(rest, region.target_offset)
        inside = torch.ones_like(rest, dtype=torch.bool)
        for extent, source, step in zip(region.size, region.source_stride, region.target_stride, strict=True):
            coordinate = torch.div(rest, source, rounding_mode="floor")
            inside &= coordinate < extent
            rest = rest - coordinate * source
            target += coordinate * step
        inside &= rest == 0
        chosen = inside.nonzero().squeeze(1)
        if len(chosen):
            yield region.storage, target[chosen], chosen + low


def _agrees(storages: tuple[ModelStorage, ...], regions: tuple[Region, ...], base: torch.Tensor) -> bool:
    base = base.reshape(-1)
    for region in regions:
        flat = storages[region.storage].flat
        served = flat.as_strided(region.size, region.target_stride, region.target_offset).contiguous()
        wanted = base.as_strided(region.size, region.source_stride, base.storage_offset() + region.source_offset)
        wanted = wanted.to(device=flat.device, dtype=flat.dtype).contiguous()
        if not torch.equal(bits(served), bits(wanted)):
            return False
    return True


def _aliases(mapped: Mapping[str, tuple[Region, ...]], opaque: dict[str, str]) -> dict[str, str]:
    """Names that repeat an earlier one; what shares a place in any other way becomes opaque."""
    aliases: dict[str, str] = {}
    first: dict[tuple[Region, ...], str] = {}
    taken: dict[int, list[tuple[int, int, str]]] = {}
    for name, regions in mapped.items():
        if regions in first:
            aliases[name] = first[regions]
            continue
        first[regions] = name
        for region in regions:
            taken.setdefault(region.storage, []).append((*region.target_range, name))
    for ranges in taken.values():
        ranges.sort()
        furthest, owner = 0, ""
        for low, high, name in ranges:
            if low < furthest and name != owner:
                # Perhaps merely interleaved, but a write that is not provably apart could depend on the order.
                for shared in (name, owner):
                    opaque.setdefault(shared, f"{name!r} and {owner!r} lie in one range of the model")
            if high > furthest:
                furthest, owner = high, name
    for name, original in aliases.items():
        if original in opaque:
            opaque.setdefault(name, opaque[original])
    return aliases


def _close_modules(touched: Mapping[str, set[str]], opaque: dict[str, str]) -> None:
    """Make opaque what shares a module with an opaque tensor, until nothing changes."""
    spoiled = {module for name in opaque for module in touched.get(name, ())}
    grown = True
    while grown:
        grown = False
        for name, modules in touched.items():
            if name not in opaque and modules & spoiled:
                opaque[name] = "its module holds a tensor that cannot be written in place"
                spoiled |= modules
                grown = True
