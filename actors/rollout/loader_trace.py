# pyright: basic
# torch's dispatch machinery is typed only in part.
"""Where each element of a checkpoint lies in a model, found by watching the model's loader once.

The loader gets tensors of the checkpoint's names, shapes and dtypes without any bytes (device "meta"), and each of its
writes into the model is looked at: a copy whose source is still a view of a checkpoint tensor is an affine `Region`.
So fusing, tensor-parallel slicing, replication and tying come from the loader itself, and no table of names is needed.

Invariants:
- Nothing in the model changes: writes are recorded, not made, and parameters that a loader replaces are put back.
- A region stands only for a plain copy. A tensor that is computed with, changed, reinterpreted, broadcast or cast to
  anything but an ordinary float on its way is *opaque*, with the reason.
- A tensor that is neither mapped nor opaque is *absent*: the loader skips it here (tied, or another rank's).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.actors.rollout.weight_regions import (
    ModelStorage,
    Region,
    TensorLayout,
    copy_region,
    model_storages,
)

_aten = torch.ops.aten

# Operations after which a tensor holds the same numbers in the same order, dtype aside.
_IDENTITIES = frozenset({_aten._to_copy.default, _aten.clone.default})

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What the loader does with a checkpoint. Every name of the layout is in exactly one of the three.

    Attributes:
        regions: Of each mapped name.
        opaque: Why a name could not be mapped.
        absent: Names that the loader skips here.
        touched: Modules that an opaque name is known to be written to.
    """

    storages: tuple[ModelStorage, ...]
    regions: Mapping[str, tuple[Region, ...]]
    opaque: Mapping[str, str]
    absent: frozenset[str]
    touched: Mapping[str, frozenset[str]]


def trace_loader(model: torch.nn.Module, load: Loader, layout: TensorLayout) -> Trace:
    """Find out where `load` puts each checkpoint tensor, without changing the model.

    Args:
        model: The module whose parameters and buffers are watched.
        load: Its loader, such as vLLM's `model.load_weights`; called once, and once a name where that fails.
        layout: The checkpoint's names, in the order in which they are loaded.
    """
    storages = model_storages(model)
    registered = RegisteredTensors(model)
    watch = _Watch(storages, layout)
    failure = _attempt(watch, registered, load, watch.sources.items())
    if failure:
        # One name upset it: by itself, each shows whether it was the one.
        watch = _Watch(storages, layout)
        for name, tensor in watch.sources.items():
            failure = _attempt(watch, registered, load, [(name, tensor)])
            if failure:
                watch.opaque[name] = failure
    mapped = {name: tuple(regions) for name, regions in watch.regions.items() if name not in watch.opaque}
    return Trace(
        storages=storages,
        regions=mapped,
        opaque=dict(watch.opaque),
        absent=frozenset(layout.keys() - mapped.keys() - watch.opaque.keys()),
        touched={name: frozenset(modules) for name, modules in watch.touched.items()},
    )


def trace_names(model: torch.nn.Module, layout: TensorLayout) -> Trace:
    """The same for a module that keeps its checkpoint's names, such as one of transformers: no loader is needed.

    Tied parameters are mapped under each of their names. A name without a parameter or buffer of its shape is opaque.
    """
    storages = model_storages(model)
    index = {storage.flat.untyped_storage()._cdata: i for i, storage in enumerate(storages)}
    tensors = dict(model.named_buffers(remove_duplicate=False)) | dict(model.named_parameters(remove_duplicate=False))
    regions: dict[str, tuple[Region, ...]] = {}
    opaque: dict[str, str] = {}
    for name, (shape, dtype) in layout.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.is_meta:
            opaque[name] = "no parameter has this name"
        elif tuple(tensor.shape) != tuple(shape):
            opaque[name] = f"the parameter has the shape {tuple(tensor.shape)}"
        elif tensor.numel():
            source = torch.empty(shape, dtype=dtype, device="meta")
            region = copy_region(index[tensor.untyped_storage()._cdata], source, tensor.detach(), storages)
            if isinstance(region, str):
                opaque[name] = region
            elif region is not None:
                regions[name] = (region,)
    absent = frozenset(layout.keys() - regions.keys() - opaque.keys())
    return Trace(storages=storages, regions=regions, opaque=opaque, absent=absent, touched={})


class RegisteredTensors:
    """The parameters and buffers that a model has, to put back what a loader replaces."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Remember them; their values are not copied."""
        self._slots: list[tuple[dict[str, Any], str, torch.Tensor | None]] = [
            (table, name, tensor)
            for module in model.modules()
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
        ]
        self._data = [None if tensor is None else tensor.data for _, _, tensor in self._slots]

    def put_back(self) -> bool:
        """Register again what was replaced or removed; whether anything was."""
        replaced = False
        for (table, name, tensor), data in zip(self._slots, self._data, strict=True):
            if table.get(name) is not tensor:
                table[name], replaced = tensor, True
            if tensor is not None and data is not None and tensor.data_ptr() != data.data_ptr():
                tensor.data, replaced = data, True
        return replaced


def _attempt(
    watch: "_Watch", registered: RegisteredTensors, load: Loader, weights: Iterable[tuple[str, torch.Tensor]]
) -> str:
    """Load under the watch; why that cannot be relied on, or nothing."""
    try:
        with torch.no_grad(), watch:
            load(iter(weights))
        failure = ""
    except Exception as error:
        # A loader may do anything with a tensor that has no bytes; the reason is kept with the name.
        failure = f"its loader fails without bytes: {type(error).__name__}: {str(error)[:120]}"
    if registered.put_back():
        failure = failure or "its loader replaces parameters"
    return failure


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook for subclasses
    """Follows the checkpoint's tensors through a loader, and keeps its writes away from the model.

    Attributes:
        sources: The tensors to load, without bytes.
        regions: Copies into the model, by name.
        opaque: Names that came into the model, or could have, by more than a copy.
    """

    def __init__(self, storages: tuple[ModelStorage, ...], layout: TensorLayout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources = {n: torch.empty(shape, dtype=dtype, device="meta") for n, (shape, dtype) in layout.items()}
        self.regions: dict[str, list[Region]] = {}
        self.opaque: dict[str, str] = {}
        self.touched: dict[str, set[str]] = {}
        self._storages = storages
        self._layout = layout
        self._targets = {_key(storage.flat): i for i, storage in enumerate(storages)}
        self._names = {_key(tensor): name for name, tensor in self.sources.items()}
        # By storage: the names that something was computed from. The tensors are kept so that no key is used twice.
        self._computed: dict[int, set[str]] = {}
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        origins = set[str]().union(*(self._origins(tensor) for tensor in tensors))
        written = _written(func, args, kwargs)
        inside = [tensor for tensor in written if _key(tensor) in self._targets]
        if inside:
            self._write(func, inside, args, origins)
            return written[0] if len(written) == 1 else tuple(written)
        if origins and func in _IDENTITIES and kwargs.get("dtype") in (None, args[0].dtype):
            # A move or a copy of the whole: what comes out is what went in. It stays without bytes.
            return args[0]
        out = func(*args, **kwargs)
        for tensor in written:
            if _key(tensor) in self._names:
                self.opaque[self._names[_key(tensor)]] = f"its loader changes it first ({func})"
        if origins:
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and _key(tensor) not in self._names:
                    self._computed.setdefault(_key(tensor), set()).update(origins)
                    self._kept.append(tensor)
        return out

    def _origins(self, tensor: torch.Tensor) -> set[str]:
        key = _key(tensor)
        return {self._names[key]} if key in self._names else self._computed.get(key, set())

    def _write(self, func: Any, inside: list[torch.Tensor], args: Any, origins: set[str]) -> None:
        modules = set[str]().union(*(self._storages[self._targets[_key(tensor)]].modules for tensor in inside))
        source = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else None
        if func is _aten.copy_.default and source is not None and _key(source) in self._names:
            name = self._names[_key(source)]
            if source.dtype == self._layout[name][1]:
                region = copy_region(self._targets[_key(inside[0])], source, inside[0], self._storages)
            else:
                region = f"reinterpreted as {source.dtype}"
            if isinstance(region, Region):
                self.regions.setdefault(name, []).append(region)
            elif region:
                self._refuse({name}, region, modules)
            return
        self._refuse(origins, f"computed by its loader ({func})", modules)

    def _refuse(self, names: set[str], reason: str, modules: set[str]) -> None:
        for name in names:
            self.opaque.setdefault(name, reason)
            self.touched.setdefault(name, set()).update(modules)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation writes to."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found
