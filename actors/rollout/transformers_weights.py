# pyright: basic
# torch is typed only in part.
"""The weights of a transformers module, moved by full updates and by deltas.

Invariants:
- `stage` only reads the module, in any thread; `load` and `apply` write, in the thread that generates, between two
  iterations. One update at a time.
- A delta is stored wholly or taken back. A full update that fails half-way leaves a mixture, which its error says.
- Tied parameters are one, under the first of their names.
"""

from typing import Any

import numpy as np
import torch

from headrace.actors.rollout.checkpoint import layout_difference
from headrace.actors.rollout.loader_trace import trace_names
from headrace.actors.rollout.weight_map import build_weight_map
from headrace.actors.rollout.weight_scatter import StagedUpdate, WeightScatter
from headrace.engine.errors import UnknownLayoutError
from headrace.engine.types import TensorSpec, UpdateKind, WeightUpdate
from headrace.engine.weights.change_update import ServedState, open_change_update
from headrace.engine.weights.payload import open_payload, verify_payload


class ModuleWeights:
    """What a module of transformers computes with; each parameter has its checkpoint's name."""

    def __init__(self, model: Any) -> None:
        """Take a loaded module, whose parameters stay where they are."""
        self._model = model
        self._parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        self._tensors: tuple[TensorSpec, ...] = ()
        self._scatter: WeightScatter | None = None

    def stage(self, update: WeightUpdate, served: ServedState) -> StagedUpdate | None:
        """Prove that an update is good, and prepare it if it is a delta. Blocks for a read of its payload.

        Raises:
            WrongBaseError: A delta from another version than is served.
            UnknownLayoutError: It has other tensors.
            CorruptUpdateError: It is damaged.
        """
        if update.manifest.kind is UpdateKind.KEYFRAME:
            verify_payload(update)
            reason = layout_difference(update.manifest, {n: tuple(p.shape) for n, p in self._parameters.items()})
            if reason:
                raise UnknownLayoutError(reason)
            return None
        changes = open_change_update(update, served)
        assert self._scatter is not None, "a full update is served, so load() has made one"
        with torch.no_grad():
            return self._scatter.stage(changes)

    def load(self, update: WeightUpdate) -> None:
        """Copy a full update into the parameters.

        Raises:
            CorruptUpdateError: The payload is gone; nothing was touched. After any other error the module is a mixture.
        """
        payload = open_payload(update)
        with torch.no_grad():
            for name, (spec, raw) in payload.items():
                # Copied, because torch has no read-only tensors.
                bits = torch.from_numpy(raw.view(np.int16 if raw.itemsize == 2 else np.int32).copy())
                self._parameters[name].copy_(bits.view(getattr(torch, spec.dtype)))
        if self._tensors != update.manifest.tensors:
            self._map(update.manifest.tensors)

    def apply(self, staged: StagedUpdate) -> None:
        """Store a delta.

        Raises:
            WeightUpdateError: It failed and was taken back.
            RunError: So did taking it back; the module may be a mixture.
        """
        assert self._scatter is not None
        with torch.no_grad():
            self._scatter.apply(staged)

    def _map(self, tensors: tuple[TensorSpec, ...]) -> None:
        layout = {spec.name: (spec.shape, getattr(torch, spec.dtype)) for spec in tensors}
        found = build_weight_map(
            self._model, trace_names(self._model, layout), layout, lambda name: self._parameters[name].detach()
        )
        self._scatter, self._tensors = WeightScatter(found), tensors
