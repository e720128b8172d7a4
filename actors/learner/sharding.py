# pyright: basic
# transformers and torch are only partly typed.
"""Process group, device and FSDP2 sharding of one model."""

import datetime
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from headrace.engine.config.schema import LearnerConfig
from headrace.engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel
else:
    PreTrainedModel = Tensor = Any

logger = logging.getLogger(__name__)


def choose_device(name: str, rank: int) -> torch.device:
    """The device of a rank: "auto" takes a GPU where there is one, GPUs in order of rank.

    Raises:
        ConfigError: A GPU is asked for and none is there.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError('learner.device = "cuda", but torch finds no GPU: set it to "auto" or "cpu"')
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


class RankGroup:
    """The learner's ranks. Joins the process group that is there, or makes one and leaves it on `close`.

    Raises:
        ConfigError: The process group that is there has another size.
    """

    def __init__(
        self, *, rank: int, num_ranks: int, init_method: str, device: torch.device, timeout_s: float = 1800.0
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self._owned = not dist.is_initialized()
        if self._owned:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                init_method=init_method,
                rank=rank,
                world_size=num_ranks,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
        elif dist.get_world_size() != num_ranks:
            raise ConfigError(
                f"learner.num_ranks is {num_ranks}, but {dist.get_world_size()} processes are in the group"
            )

    def sum(self, values: list[float]) -> list[float]:
        """Add up over all ranks, in float64; every rank gets the same bits."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: list[float]) -> list[float]:
        """The largest over all ranks; every rank gets the same."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def gather(self, values: list[int]) -> list[list[int]]:
        """Every rank's values, by rank; all have as many, each below 2**63."""
        if self.num_ranks == 1:
            return [values]
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        everyones = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(everyones, mine)
        return [tensor.tolist() for tensor in everyones]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum([0.0])

    def close(self) -> None:
        """Leave the process group if it is ours. May be called twice."""
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()
        self._owned = False

    def _reduce(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.num_ranks == 1 or not values:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()


def shard_model(model: PreTrainedModel, group: RankGroup, config: LearnerConfig) -> dict[str, Tensor]:
    """Shard parameters in place over the ranks: one unit a decoder layer, the rest in the root.

    Master weights stay in the dtype that the model was loaded in. Dimension 0 is cut, so that each shard is one
    contiguous range of the flattened parameter.

    Returns:
        The sharded parameters by name, shared ones once. They stay the same objects, whereas the model shows whole
        parameters in their place between a forward pass and the next resharding.

    Raises:
        ConfigError: Mixed precision asks for float16, which would need loss scaling.
    """
    if config.mixed_precision == "fp16":
        raise ConfigError('learner.mixed_precision = "fp16" needs loss scaling, which is not there: set "bf16" or "no"')
    is_fast = group.device.type != "cpu" or _cpu_multiplies_bfloat16()
    if config.mixed_precision == "bf16" and not is_fast:
        logger.warning('this CPU only emulates bfloat16, many times slower: set learner.mixed_precision = "no"')
    policy = MixedPrecisionPolicy()
    if config.mixed_precision == "bf16" or (config.mixed_precision == "auto" and is_fast):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(group.device.type, (group.num_ranks,))
    torch.nn.Module.to(model, group.device)  # transformers' own wrapper of it has no usable type
    layer_classes = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in layer_classes:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return dict(model.named_parameters())


def reshard_model(model: torch.nn.Module) -> None:
    """Drop whole parameters that a forward pass without a backward pass left behind; they would grow stale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _cpu_multiplies_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def local_shard(parameter: Tensor) -> tuple[int, Tensor]:
    """This rank's part of a parameter: its first element in the flattened parameter, and its elements, flat.

    The elements share memory with the parameter; there may be none.
    """
    if not isinstance(parameter, DTensor):
        return 0, parameter.detach().reshape(-1)
    (placement,) = parameter.placements
    assert isinstance(placement, Shard) and placement.dim == 0, "parameters are cut along dimension 0"
    local = parameter.to_local().detach()
    mesh = parameter.device_mesh
    rows = parameter.shape[0]
    # torch.chunk's rule: every rank but the last ones has the same, largest number of rows.
    per_rank = -(-rows // mesh.size())
    first_row = min(mesh.get_local_rank() * per_rank, rows)
    return first_row * (parameter.numel() // max(rows, 1)), local.reshape(-1)


def local_gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """This rank's parts of all gradients; they share memory with them."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            yield gradient.to_local() if isinstance(gradient, DTensor) else gradient
