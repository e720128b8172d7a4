# pyright: basic
# torch is typed only in part.
"""A copy of the tensors that cannot be changed in place, so that a delta of them can be loaded whole.

Experts, quantised weights and modules with derived copies keep their numbers in a form that only their own loader can
make. So their checkpoint tensors are kept here, on the CPU; a delta patches them, and what it touches is loaded again.
"""

from collections.abc import Callable, Iterable, Mapping, Set

import numpy as np
import torch

from headrace.actors.rollout.weight_map import ReadTensor, WeightMap, bits
from headrace.engine.errors import WeightUpdateError
from headrace.engine.weights.changes import WeightChange

# Loads these whole checkpoint tensors into the model, with whatever processing follows a load.
Reload = Callable[[Mapping[str, torch.Tensor]], None]


class OpaqueShadow:
    """Checkpoint tensors in host memory, as large as all opaque tensors together."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], groups: Mapping[str, Set[str]], reload: Reload) -> None:
        """Take over contiguous CPU tensors.

        Args:
            tensors: Of each opaque name, in the dtype of updates; changed in place from now on.
            groups: The modules of each name; names that share one are loaded together. Empty: unknown.
            reload: Called with whole groups.
        """
        self._tensors = tensors
        self._groups = {name: frozenset(groups.get(name, ())) for name in tensors}
        self._reload = reload

    @classmethod
    def from_checkpoint(cls, weight_map: WeightMap, read: ReadTensor, reload: Reload) -> "OpaqueShadow":
        """Read the map's opaque tensors; the model must hold that checkpoint."""
        tensors = {
            name: read(name).to(weight_map.layout[name][1]).contiguous().clone() for name in sorted(weight_map.opaque)
        }
        return cls(tensors, weight_map.groups, reload)

    @property
    def names(self) -> frozenset[str]:
        """The opaque tensors."""
        return frozenset(self._tensors)

    def tensor(self, name: str) -> torch.Tensor:
        """The copy of one tensor; to read."""
        return self._tensors[name]

    def patch(self, changes: Iterable[WeightChange]) -> list[WeightChange]:
        """Change the copies, not the model; returns the change that takes this one back.

        Raises:
            WeightUpdateError: A name is not kept here; nothing was changed.
        """
        changes = list(changes)
        for change in changes:
            if change.name not in self._tensors:
                raise WeightUpdateError(f"{change.name!r} has no copy to patch; send a full update.")
        undo: list[WeightChange] = []
        for change in changes:
            flat = _unsigned(self._tensors[change.name])
            where = (
                slice(change.start, change.start + len(change.values)) if change.positions is None else change.positions
            )
            old = np.array(flat[where])
            undo.append(
                WeightChange(name=change.name, values=old, positions=change.positions, start=change.start),
            )
            flat[where] = change.values
        undo.reverse()
        return undo

    def replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over values that a full update has loaded already."""
        for name, value in tensors.items():
            self._tensors[name].copy_(value)

    def reload(self, names: Set[str]) -> None:
        """Load these names into the model again, and with them all that shares a module with one of them."""
        wanted = self.together(names)
        self._reload({name: tensor for name, tensor in self._tensors.items() if name in wanted})

    def together(self, names: Set[str]) -> frozenset[str]:
        """The names that must be loaded with `names`. Where a module is unknown, all of its kind."""
        wanted = set(names)
        while True:
            modules = {module for name in wanted for module in self._groups[name]}
            unknown = any(not self._groups[name] for name in wanted)
            more = {
                name
                for name, group in self._groups.items()
                if name not in wanted and (group & modules or (unknown and not group))
            }
            if not more:
                return frozenset(wanted)
            wanted |= more


def _unsigned(tensor: torch.Tensor) -> np.ndarray:
    flat: np.ndarray = bits(tensor).reshape(-1).numpy()
    return flat.view(f"u{flat.itemsize}")
