# pyright: basic
# torch is only partly typed.
"""Publishing sharded weights: each rank writes its own ranges, under the checkpoint's names; nothing is gathered.

The copy is taken between two steps, where the shards lie; it costs their size in the published dtype, twice while an
update is being written (`engine/weights/sender.py` keeps the copy before as the image).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace.actors.learner.shard_runs import local_elements, published_runs
from headrace.actors.learner.sharding import RankGroup
from headrace.actors.learner.weight_delta import diff_bucket, host_bits
from headrace.engine.config.hardware import model_dtype
from headrace.engine.config.schema import Config
from headrace.engine.errors import ConfigError
from headrace.engine.types import PolicyVersion, TensorSpec
from headrace.engine.weights.planes import BucketPlanes
from headrace.engine.weights.sender import Shard, StagedPart, WeightSender
from headrace.engine.weights.ulp import RawArray

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel
else:
    PreTrainedModel = Tensor = Any


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


class TensorBits:
    """Reads tensors for the sender where they lie; on a GPU on a stream of its own, beside the next step's work."""

    def __init__(self, device: torch.device) -> None:
        stream: Any = torch.cuda.Stream
        self._stream = stream(device) if device.type == "cuda" else None
        self._ready: Any = None

    def made(self) -> None:
        """The tensors to be read have just been made, on this thread's stream."""
        if self._stream is not None:
            self._ready = torch.cuda.current_stream(self._stream.device).record_event()

    def diff(self, base: Tensor, new: Tensor, *, name_id: int, start: int) -> BucketPlanes:
        """See `sender.Bits`."""
        with self._beside():
            return diff_bucket(base, new, name_id=name_id, start=start)

    def on_host(self, array: Tensor) -> RawArray:
        """See `sender.Bits`."""
        with self._beside():
            return host_bits(array)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None or self._ready is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            yield


class WeightExporter:
    """Copies one rank's shards, cast to the published dtype, and makes updates of them. Made on all ranks together."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        *,
        config: Config,
        run_id: str,
        group: RankGroup,
    ) -> None:
        dtype = model_dtype(config)
        self._parameters = [parameter for _, parameter in parameters]
        self._dtype = getattr(torch, dtype)
        self._group = group
        self._runs = published_runs(self._parameters, group)
        self._bits = TensorBits(group.device)
        self.tensors = tuple(
            TensorSpec(name=name, dtype=dtype, shape=tuple(parameter.shape)) for name, parameter in parameters
        )
        self._sender: WeightSender[Tensor] = WeightSender(
            self.tensors,
            run_id=run_id,
            rank=group.rank,
            keyframe_steps=config.weights.keyframe_steps,
            bits=self._bits,
        )

    def stage(self, version: PolicyVersion, since: PolicyVersion | None) -> StagedPart[Tensor]:
        """Copy the shards as they are now. Collective: where one rank needs a keyframe, all make one.

        Args:
            version: Of the weights.
            since: The newest version that the hub took, as far as the caller knows; None asks for a keyframe.
        """
        needed = self._sender.needs_keyframe(version, since)
        full = self._group.max([float(needed)])[0] > 0
        shards = [
            Shard(tensor_index=index, runs=runs, elements=local_elements(parameter).to(self._dtype, copy=True))
            for index, (parameter, runs) in enumerate(zip(self._parameters, self._runs, strict=True))
            if runs
        ]
        self._bits.made()
        return self._sender.stage(version, shards, full=full)

    def reset(self) -> None:
        """Forget what was published: the weights are others now."""
        self._sender.reset()
