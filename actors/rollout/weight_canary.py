# pyright: basic
# torch is typed only in part.
"""Proof, before the first delta, that a model computes with the weights that a scatter reaches.

Kernels may keep a packed or derived copy of a weight. A delta then maps, verifies, is stored and changes nothing; no
error tells. So at attach a random delta is written into one module of each kind, and the modules are run:

1. Scattered, each must answer otherwise than before; taken back, exactly as before.
2. Given the same new weights by the model's own loader, it must hold the same state and give the same answers.
3. Of tensors that go by reload: the unchanged copy, loaded, must change nothing, and a changed one something.

Invariants:
- The model holds the same parameters and buffers afterwards as before, bit for bit, whatever was found.
- Step 2 comes only after step 1 succeeded, so a refusal for a packed copy leaves that copy as it was.
- Nothing is communicated: ranks may find different things, and each says so.
"""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from headrace.actors.rollout.loader_trace import RegisteredTensors
from headrace.actors.rollout.weight_map import ReadTensor, WeightMap, bits
from headrace.actors.rollout.weight_probe import (
    RunModule,
    changed_tensor,
    choose_modules,
    dense_change,
    hidden_tensors,
    names_in,
    random_change,
)
from headrace.actors.rollout.weight_scatter import WeightScatter
from headrace.actors.rollout.weight_shadow import OpaqueShadow, Reload
from headrace.engine.errors import WeightUpdateError

_Answers = Mapping[str, tuple[torch.Tensor, ...]]


def check_scatter(
    model: torch.nn.Module, weight_map: WeightMap, read: ReadTensor, *, run: RunModule, reload: Reload
) -> tuple[str, ...]:
    """Steps 1 and 2. Changes weights for a moment: nothing may be generated meanwhile, and no other thread may write.

    Args:
        model: Holds the checkpoint's weights.
        weight_map: Of the model.
        read: The checkpoint's tensors.
        run: Runs a module; see `weight_probe.run_plain_module`.
        reload: The model's own loader, with whatever must follow a load.

    Returns:
        Paths of the modules that were run.

    Raises:
        WeightUpdateError: A module does not compute with what was written, or the loader and the scatter disagree.
    """
    paths = choose_modules(model, weight_map)
    names = names_in(weight_map, paths)
    base = {name: read(name).to(weight_map.layout[name][1]).contiguous() for name in names}
    generator = np.random.default_rng(0)
    changes = [random_change(name, weight_map, base[name], generator) for name in names]
    owners = {m for n in names for r in weight_map.regions[n] for m in weight_map.storages[r.storage].modules}
    with _restored(model, owners):
        before = _answers(model, paths, run)
        scatter = WeightScatter(weight_map)
        staged = scatter.stage(changes)
        scatter.apply(staged)
        scattered, state = _answers(model, paths, run), _copy(hidden_tensors(model, owners))
        scatter.undo(staged)
        _refuse_blind(model, before, scattered)
        _refuse_other(before, _answers(model, paths, run), "after a change was taken back")
        reload({change.name: changed_tensor(change, base[change.name]) for change in changes})
        differing = _differing(hidden_tensors(model, owners), state)
        if differing:
            raise WeightUpdateError(
                f"{differing[0]} is another after a load than after a scatter of the same weights, so something is "
                "derived from them when they are loaded; send full updates."
            )
        _refuse_other(scattered, _answers(model, paths, run), "to loaded than to scattered weights")
        reload(base)
        _refuse_other(before, _answers(model, paths, run), "after its weights were loaded again")
    return tuple(before)


def check_reload(model: torch.nn.Module, weight_map: WeightMap, shadow: OpaqueShadow) -> tuple[str, ...]:
    """Step 3, for one group of each layout. The same conditions as for `check_scatter`.

    Returns:
        A name of each group that was loaded.

    Raises:
        WeightUpdateError: Loading a copy of what is served changes it, or loading changed weights does not.
    """
    kinds: dict[Any, str] = {}
    for name in sorted(shadow.names):
        together = shadow.together({name})
        kinds.setdefault(tuple(sorted(str(weight_map.layout[other]) for other in together)), name)
    for name in kinds.values():
        modules = {m for other in shadow.together({name}) for m in weight_map.groups[other]} or None
        with _restored(model, modules) as served:
            shadow.reload({name})
            differing = _differing(hidden_tensors(model, modules), served)
            if differing:
                raise WeightUpdateError(
                    f"Loading {name!r} unchanged changes {differing[0]}, so this model cannot take new weights while "
                    "it runs; start it with other kernels."
                )
            undo = shadow.patch([dense_change(name, shadow.tensor(name))])
            try:
                shadow.reload({name})
                differing = _differing(hidden_tensors(model, modules), served)
            finally:
                shadow.patch(undo)
                shadow.reload({name})
            if not differing:
                raise WeightUpdateError(f"Loading a changed {name!r} changes nothing in the model; send full updates.")
            if _differing(hidden_tensors(model, modules), served):
                raise WeightUpdateError(f"Loading {name!r} again does not give its old values back.")
    return tuple(kinds.values())


@contextmanager
def _restored(model: torch.nn.Module, modules: Iterable[str] | None) -> Generator[dict[str, torch.Tensor]]:
    """Put the modules' tensors back at the end, with the bits that they have now; gives a copy of them."""
    registered = RegisteredTensors(model)
    tensors = hidden_tensors(model, modules)
    served = _copy(tensors)
    try:
        yield served
    finally:
        registered.put_back()
        for name in _differing(tensors, served):
            bits(tensors[name]).copy_(bits(served[name]))


def _copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # On the CPU: the accelerator may have no room for it.
    return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _differing(tensors: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> list[str]:
    """Names whose bits, shape or presence differ."""
    return [
        name
        for name in sorted(tensors.keys() | saved.keys())
        if name not in tensors
        or name not in saved
        or tensors[name].shape != saved[name].shape
        or not torch.equal(bits(tensors[name].cpu().contiguous()), bits(saved[name]))
    ]


def _answers(model: torch.nn.Module, paths: Iterable[str], run: RunModule) -> dict[str, tuple[torch.Tensor, ...]]:
    found: dict[str, tuple[torch.Tensor, ...]] = {}
    with torch.no_grad():
        for path in paths:
            outputs = run(model.get_submodule(path))
            if outputs:
                found[path] = tuple(output.detach().clone().contiguous() for output in outputs)
    return found


def _refuse_blind(model: torch.nn.Module, before: _Answers, scattered: _Answers) -> None:
    for path, outputs in before.items():
        for old, new in zip(outputs, scattered[path], strict=True):
            if torch.equal(bits(old), bits(new)):
                raise WeightUpdateError(
                    f"{path} ({type(model.get_submodule(path)).__name__}) answers the same after its weights were "
                    "changed in place, so it computes with a packed or derived copy and deltas would change nothing; "
                    "turn that packing off or send full updates."
                )


def _refuse_other(before: _Answers, after: _Answers, when: str) -> None:
    for path, outputs in before.items():
        if any(not torch.equal(bits(old), bits(new)) for old, new in zip(outputs, after[path], strict=True)):
            raise WeightUpdateError(f"{path} answers otherwise {when}; deltas of this model cannot be trusted.")
