# pyright: basic
# torch's storages are typed only in part.
"""Regions: blocks of checkpoint tensors that lie in a model's storages, as affine maps of element positions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

# A cast between these is one rounding per element, the same in a loader's copy and in a scatter.
PLAIN_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32})

# Shape and dtype of each checkpoint tensor, by name.
TensorLayout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A block of one checkpoint tensor that lies in one storage of the model.

    Element (k_0, ...), 0 <= k_i < size[i], is checkpoint element source_offset + sum k_i * source_stride[i], and
    element target_offset + sum k_i * target_stride[i] of the storage. All in elements, not bytes.

    Attributes:
        storage: Index into the model's storages.
        size: Dimensions by falling source stride, merged where possible; each inner one lies within one outer step.
    """

    storage: int
    source_offset: int
    target_offset: int
    size: tuple[int, ...]
    source_stride: tuple[int, ...]
    target_stride: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """How many elements the region has."""
        count = 1
        for extent in self.size:
            count *= extent
        return count

    @property
    def source_span(self) -> int:
        """Elements from the first to the last in the checkpoint, both included."""
        return 1 + sum((n - 1) * stride for n, stride in zip(self.size, self.source_stride, strict=True))

    @property
    def target_range(self) -> tuple[int, int]:
        """The smallest range of the storage that holds the region."""
        span = sum((n - 1) * stride for n, stride in zip(self.size, self.target_stride, strict=True))
        return self.target_offset, self.target_offset + span + 1

    @property
    def is_run(self) -> bool:
        """Whether consecutive checkpoint elements are consecutive in the storage."""
        return len(self.size) == 1 and self.source_stride == (1,) and self.target_stride == (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStorage:
    """One storage of the model: a parameter's or buffer's, whole, whatever views of it are registered.

    Attributes:
        name: Of the first parameter or buffer that lies there.
        modules: Paths of all modules that have it.
        flat: One-dimensional view of all elements.
    """

    name: str
    modules: frozenset[str]
    flat: torch.Tensor


def merge_dimensions(
    shape: Iterable[int], source_stride: Iterable[int], target_stride: Iterable[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Sizes and strides in the normal form of `Region`; None where the source's dimensions interleave."""
    dims = [d for d in zip(shape, source_stride, target_stride, strict=True) if d[0] != 1]
    dims.sort(key=lambda d: -d[1])
    merged: list[tuple[int, int, int]] = []
    for n, source, target in dims:
        if merged and merged[-1][1] == source * n and merged[-1][2] == target * n:
            merged[-1] = (merged[-1][0] * n, source, target)
        else:
            merged.append((n, source, target))
    inner = 0
    for n, source, _ in reversed(merged):
        if source <= inner:
            return None
        inner += (n - 1) * source
    if not merged:
        merged = [(1, 1, 1)]
    sizes, sources, targets = zip(*merged, strict=True)
    return sizes, sources, targets


def model_storages(model: torch.nn.Module) -> tuple[ModelStorage, ...]:
    """Each storage of the model's parameters and buffers once, in the order of their names."""
    found: dict[int, tuple[str, set[str], torch.Tensor]] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        storage = tensor.untyped_storage()
        if tensor.is_meta or not storage.nbytes():
            continue
        if storage._cdata not in found:
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
            found[storage._cdata] = (name, set(), flat)
        found[storage._cdata][1].add(name.rpartition(".")[0])
    return tuple(ModelStorage(name=n, modules=frozenset(m), flat=f) for n, m, f in found.values())


def copy_region(
    storage: int, source: torch.Tensor, target: torch.Tensor, storages: tuple[ModelStorage, ...]
) -> Region | str | None:
    """The region of `target.copy_(source)`, why there is none, or None where nothing is copied.

    Args:
        storage: Index of the storage that `target` lies in.
        source: A view of a checkpoint tensor; only its dtype, shape, strides and offset are looked at.
        target: A view into the model.
        storages: All of the model's.
    """
    if source.dtype not in PLAIN_FLOATS or target.dtype not in PLAIN_FLOATS:
        return f"cast from {source.dtype} to {target.dtype}"
    if target.dtype != storages[storage].flat.dtype:
        return f"{storages[storage].name} is written through a view of another dtype"
    if not target.numel():
        return None
    source = source.expand(target.shape)
    dims = merge_dimensions(target.shape, source.stride(), target.stride())
    if dims is None:
        return "broadcast, or read in interleaved pieces"
    return Region(
        storage=storage,
        source_offset=int(source.storage_offset()),
        target_offset=int(target.storage_offset()),
        size=dims[0],
        source_stride=dims[1],
        target_stride=dims[2],
    )
