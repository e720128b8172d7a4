# pyright: basic
# torch is only partly typed.
"""Where a rank's share of a parameter lies in the whole one, however it is cut, and which rank publishes it.

A share is a list of runs (first element, number of elements) of the flattened parameter, in the order of the local
elements. FSDP cuts dimension 0: one run. Tensor parallelism along dimension 1 leaves a run a row; FSDP on top of tensor
parallelism along the same dimension (strided shards) one that begins elsewhere than the rank's number suggests.

Torch's own placement says which indices a rank has: it is asked to place the indices 0, 1, 2, ... of each dimension.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from headrace.actors.learner.sharding import RankGroup
from headrace.engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Runs = tuple[tuple[int, int], ...]
Indices = npt.NDArray[np.int64]

_NOTHING = -1


def local_elements(parameter: Tensor) -> Tensor:
    """This rank's share, flat; shares memory with the parameter where that is contiguous. There may be none."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach().reshape(-1)


def shard_runs(parameter: Tensor) -> Runs:
    """Where `local_elements` lie in the flattened parameter. No communication.

    Raises:
        ConfigError: The parameter is placed in a way that has no such list.
    """
    if not isinstance(parameter, DTensor):
        return ((0, parameter.numel()),) if parameter.numel() else ()
    runs = runs_of_block([_own_indices(parameter, dim) for dim in range(parameter.ndim)], parameter.shape)
    if sum(count for _, count in runs) != parameter.to_local().numel():
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} is placed as {parameter.placements}, which cannot be "
            "published; shard it along its dimensions or replicate it"
        )
    return runs


def runs_of_block(indices: Sequence[Indices], shape: Sequence[int]) -> Runs:
    """The runs of the elements whose index along each dimension is in `indices`, in row-major order.

    Args:
        indices: For each dimension, shape [what the block has of it].
        shape: Of the whole.
    """
    if any(not len(own) for own in indices):
        return ()
    cut = [dim for dim, own in enumerate(indices) if len(own) != shape[dim]]
    last = cut[-1] if cut else 0
    if not indices:
        return ((0, 1),)
    inner = int(np.prod(shape[last + 1 :], dtype=np.int64))
    own = indices[last]
    begins = np.flatnonzero(np.diff(own, prepend=own[0] - 2) != 1)
    counts = np.diff(begins, append=len(own)) * inner
    outer = np.zeros(1, np.int64)
    for dim in range(last):
        outer = (outer[:, None] * shape[dim] + indices[dim][None, :]).reshape(-1)
    starts = ((outer * shape[last])[:, None] + own[begins][None, :]).reshape(-1) * inner
    counts = np.tile(counts, len(outer))
    first = np.flatnonzero(np.concatenate([[True], starts[1:] != starts[:-1] + counts[:-1]]))
    return tuple(zip(starts[first].tolist(), np.add.reduceat(counts, first).tolist(), strict=True))


def published_runs(parameters: Sequence[Tensor], group: RankGroup) -> list[Runs]:
    """For each parameter the runs that this rank publishes; none where a lower rank has the same ones. Collective.

    So replicas (HSDP, tensor parallelism, a whole copy on each rank) publish once.
    """
    runs = [shard_runs(parameter) for parameter in parameters]
    everyones = group.gather([_fingerprint(own) for own in runs])
    lower = everyones[: group.rank]
    mine = everyones[group.rank]
    return [() if any(other[i] == mine[i] for other in lower) else own for i, own in enumerate(runs)]


def _own_indices(parameter: DTensor, dim: int) -> Indices:
    placements = [_along(placement, dim) for placement in parameter.placements]
    whole = torch.arange(parameter.shape[dim], device=parameter.to_local().device)
    placed = distribute_tensor(whole, parameter.device_mesh, placements, src_data_rank=None)
    return placed.to_local().cpu().numpy()


def _along(placement: Placement, dim: int) -> Placement:
    """What a placement does to the indices of one dimension."""
    if getattr(placement, "dim", None) != dim:
        return Replicate()
    if isinstance(placement, _StridedShard):
        return _StridedShard(0, split_factor=placement.split_factor)
    return Shard(0)


def _fingerprint(runs: Runs) -> int:
    if not runs:
        return _NOTHING
    return xxhash.xxh3_64_intdigest(np.array(runs, np.int64).tobytes()) >> 1
