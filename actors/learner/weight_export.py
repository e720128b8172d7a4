# pyright: basic
# torch is only partly typed.
"""Publishing sharded weights: each rank writes its own ranges, under the checkpoint's names; nothing is gathered."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.actors.learner.sharding import local_shard
from headrace.engine.errors import ConfigError
from headrace.engine.types import PolicyVersion, TensorSpec, WeightUpdate
from headrace.engine.weights.payload import KeyframeWriter

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel
else:
    PreTrainedModel = Tensor = Any

_RAW = {"bfloat16": torch.uint16, "float16": torch.uint16, "float32": torch.uint32}


def canonical_parameters(
    model: PreTrainedModel, parameters: Mapping[str, Tensor], checkpoint_names: frozenset[str]
) -> list[tuple[str, Tensor]]:
    """Parameters under the names that the model's checkpoint has, in the model's order; tied ones once.

    Args:
        model: What they belong to.
        parameters: By their names in the model; a shared one once.
        checkpoint_names: Tensor names of the checkpoint that the model was loaded from.

    Raises:
        ConfigError: A parameter has no tensor of its own in the checkpoint (for example experts that were fused while
            loading), so receivers could not place it.
    """
    prefix = f"{model.base_model_prefix}."
    tied = set(getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ())
    found: list[tuple[str, Tensor]] = []
    for name, parameter in parameters.items():
        candidates = [name, name.removeprefix(prefix)]
        canonical = next((candidate for candidate in candidates if candidate in checkpoint_names), None)
        if canonical is None and name not in tied:
            raise ConfigError(f"parameter {name!r} is not a tensor of the checkpoint: this model cannot be published")
        found.append((canonical or name, parameter))
    return found


class WeightExporter:
    """Writes keyframes of one rank's shards."""

    def __init__(self, parameters: list[tuple[str, Tensor]], *, dtype: str, run_id: str) -> None:
        self._parameters = parameters
        self._dtype = dtype
        self._run_id = run_id
        self.tensors = tuple(
            TensorSpec(name=name, dtype=dtype, shape=tuple(parameter.shape)) for name, parameter in parameters
        )

    def write(self, version: PolicyVersion, payload_dir: Path) -> WeightUpdate:
        """Write this rank's part of a full update, cast to the published dtype. Blocks for the copy; not collective.

        Raises:
            StorageError: There is no room in `payload_dir`.
        """
        path = payload_dir / f"keyframe-{version.incarnation}-{version.version}.bin"
        target = getattr(torch, self._dtype)
        with KeyframeWriter(path, self.tensors, run_id=self._run_id, version=version) as writer:
            for index, (_, parameter) in enumerate(self._parameters):
                start, local = local_shard(parameter)
                if local.numel():
                    raw = local.to(target).view(_RAW[self._dtype]).cpu().contiguous().numpy()
                    writer.write(index, start, raw)
            return WeightUpdate(manifest=writer.manifest(), local_path=str(path))
