# pyright: basic
# torch is typed only in part.
"""Weight changes written in place: prepared while the model serves, applied in a pause, taken back where that fails.

`stage` does what costs: it translates positions, moves values to the device, converts them and keeps the old ones.
`apply` only stores. Tensors that have no place in the model (opaque) go through a shadow, see `weight_shadow.py`.

Invariants:
- One writer: between `stage` and `apply` nothing else changes the model. A staged update that another update overtook
  is refused, because the values that it kept for taking back are no longer the served ones.
- After `apply` raises WeightUpdateError the old version is served, whole. RunError says that taking back failed too:
  the model may then be a mixture and must not serve until a full update succeeds.
- Integers move, not floats: bits arrive as they were sent, NaN payloads included.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from headrace.actors.rollout.weight_map import WeightMap, bits, remap
from headrace.actors.rollout.weight_regions import Region
from headrace.actors.rollout.weight_shadow import OpaqueShadow
from headrace.engine.errors import CorruptUpdateError, RunError, WeightUpdateError
from headrace.engine.weights.changes import WeightChange, check_change


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """New and old bits of one storage: at `index` (int64 [K]), or in the block (size, stride, offset)."""

    storage: int
    values: torch.Tensor
    old: torch.Tensor
    index: torch.Tensor | None = None
    block: tuple[tuple[int, ...], tuple[int, ...], int] | None = None


@dataclass(slots=True, kw_only=True)
class StagedUpdate:
    """An update that is ready to be stored.

    Attributes:
        writes: For the mapped tensors.
        opaque: Changes of opaque tensors.
        num_elements: How many elements of this model the writes store.
        generation: The scatter's count of changes when this was staged.
        undo_opaque: While the shadow holds the new values: what takes them back.
    """

    writes: list[_Write]
    opaque: list[WeightChange]
    num_elements: int
    generation: int
    undo_opaque: list[WeightChange] | None = None


class WeightScatter:
    """Applies changes to one model through its map. Not thread-safe; `stage` only reads the model."""

    def __init__(self, weight_map: WeightMap, shadow: OpaqueShadow | None = None) -> None:
        """Prepare for a model; without a shadow, changes of opaque tensors are refused."""
        self._map = weight_map
        self._shadow = shadow
        self._flat = [bits(storage.flat) for storage in weight_map.storages]
        self._generation = 0

    def stage(self, changes: Iterable[WeightChange]) -> StagedUpdate:
        """Prepare an update on the model's device; nothing that is served changes.

        Costs time and memory in proportion to what changes: per element 8 bytes for its index and twice its own width.

        Raises:
            CorruptUpdateError: A name is unknown, or positions or values do not fit their tensor.
            WeightUpdateError: An opaque tensor changes and there is no shadow.
        """
        changes = list(changes)
        pieces: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        writes: list[_Write] = []
        opaque: list[WeightChange] = []
        named = {change.name for change in changes}
        for change in changes:
            self._check(change)
            if change.name in self._map.opaque:
                if self._shadow is None:
                    raise WeightUpdateError(
                        f"{change.name!r} cannot be changed in place ({self._map.opaque[change.name]}); "
                        "send a full update."
                    )
                opaque.append(change)
            elif change.name in self._map.regions and self._map.aliases.get(change.name) not in named:
                self._stage_mapped(change, pieces, writes)
        for storage, parts in pieces.items():
            index = torch.cat([part[0] for part in parts])
            values = torch.cat([part[1] for part in parts])
            old = self._flat[storage].index_select(0, index)
            writes.append(_Write(storage=storage, values=values, old=old, index=index))
        count = sum(write.values.numel() for write in writes)
        return StagedUpdate(writes=writes, opaque=opaque, num_elements=count, generation=self._generation)

    def apply(self, staged: StagedUpdate) -> None:
        """Store a staged update. Call it while the model stands still.

        On an accelerator the stores are queued on the current stream. `undo` takes the update back afterwards.

        Raises:
            WeightUpdateError: The update was overtaken by another, or a store or a reload failed and was taken back.
            RunError: It failed and so did taking it back; the model may be a mixture.
        """
        self._check_generation(staged)
        self._store_all(staged, forward=True)
        self._generation += 1
        staged.generation = self._generation

    def undo(self, staged: StagedUpdate) -> None:
        """Put back, bit for bit, what the update changed. Only for the last one that was applied.

        Raises:
            WeightUpdateError: Another update came after it, or a store failed and the update still stands.
            RunError: Storing failed and so did going on; the model may be a mixture.
        """
        self._check_generation(staged)
        self._store_all(staged, forward=False)
        self._generation += 1

    def _check_generation(self, staged: StagedUpdate) -> None:
        if staged.generation != self._generation:
            raise WeightUpdateError("Another update was applied since this one was staged; stage it again.")

    def _store_all(self, staged: StagedUpdate, *, forward: bool) -> None:
        begun: list[_Write] = []
        reloading = False
        try:
            for write in staged.writes:
                begun.append(write)
                self._store(write, write.values if forward else write.old)
            reloading = True
            self._store_opaque(staged, forward=forward)
        except Exception as error:
            try:
                for write in begun:
                    self._store(write, write.old if forward else write.values)
                if reloading:
                    self._store_opaque(staged, forward=not forward)
            except Exception as second:
                raise RunError(
                    f"A weight update failed ({error}) and could not be taken back ({second}); send a full update."
                ) from second
            raise WeightUpdateError(f"A weight update failed and was taken back: {error}") from error

    def _store(self, write: _Write, values: torch.Tensor) -> None:
        flat = self._flat[write.storage]
        if write.index is not None:
            flat.scatter_(0, write.index, values)
        else:
            assert write.block is not None
            flat.as_strided(*write.block).copy_(values)

    def _store_opaque(self, staged: StagedUpdate, *, forward: bool) -> None:
        if not staged.opaque:
            return
        assert self._shadow is not None
        if forward and staged.undo_opaque is None:
            staged.undo_opaque = self._shadow.patch(staged.opaque)
        elif not forward and staged.undo_opaque is not None:
            self._shadow.patch(staged.undo_opaque)
            staged.undo_opaque = None
        self._shadow.reload({change.name for change in staged.opaque})

    def _check(self, change: WeightChange) -> None:
        if change.name not in self._map.layout:
            raise CorruptUpdateError(f"The update names {change.name!r}, which the served model does not have.")
        shape, dtype = self._map.layout[change.name]
        if change.values.itemsize != dtype.itemsize:
            raise CorruptUpdateError(f"The values of {change.name!r} are not of the width of {dtype}.")
        check_change(change, torch.Size(shape).numel())

    def _stage_mapped(
        self,
        change: WeightChange,
        pieces: dict[int, list[tuple[torch.Tensor, torch.Tensor]]],
        writes: list[_Write],
    ) -> None:
        regions = self._map.regions[change.name]
        dtype = self._map.layout[change.name][1]
        device = self._flat[regions[0].storage].device
        values = _tensor(change.values).to(device).view(dtype)
        rest: list[Region] = []
        for region in regions:
            block = None
            if change.positions is None:
                if not _overlap(region, change):
                    continue
                block = _block(region, change)
            if block is None:
                rest.append(region)
                continue
            source, target = block
            assert values.storage_offset() == 0
            new = self._converted(values.as_strided(*source), region.storage).contiguous()
            old = self._flat[region.storage].as_strided(*target).clone(memory_format=torch.contiguous_format)
            writes.append(_Write(storage=region.storage, values=new, old=old, block=target))
        if not rest:
            return
        if change.positions is None:
            positions = torch.arange(change.start, change.start + len(values), device=device)
        else:
            positions = _tensor(change.positions).to(device).long()
        for storage, index, select in remap(tuple(rest), positions):
            pieces.setdefault(storage, []).append((index, self._converted(values[select], storage)))

    def _converted(self, values: torch.Tensor, storage: int) -> torch.Tensor:
        """Bits of the values in the storage's dtype."""
        flat = self._map.storages[storage].flat
        return bits(values if values.dtype == flat.dtype else values.to(flat.dtype))


_Block = tuple[tuple[int, ...], tuple[int, ...], int]


def _tensor(array: np.ndarray) -> torch.Tensor:
    """The array's memory, signed: torch has few kernels for unsigned integers."""
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns; it is only read from.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array.view(f"i{array.itemsize}"))


def _overlap(region: Region, change: WeightChange) -> bool:
    return (
        region.source_offset < change.start + len(change.values)
        and change.start < region.source_offset + region.source_span
    )


def _block(region: Region, change: WeightChange) -> tuple[_Block, _Block] | None:
    """Views of a dense range's values and of the storage for what both share, where that is a block; else None.

    A region that lies wholly in the range is one; of a run, so is any part.
    """
    low, high = change.start, change.start + len(change.values)
    first, last = region.source_offset, region.source_offset + region.source_span
    if low <= first and last <= high:
        return (
            (region.size, region.source_stride, first - low),
            (region.size, region.target_stride, region.target_offset),
        )
    low, high = max(low, first), min(high, last)
    if not region.is_run:
        return None
    return (
        ((high - low,), (1,), low - change.start),
        ((high - low,), (1,), region.target_offset + low - first),
    )
