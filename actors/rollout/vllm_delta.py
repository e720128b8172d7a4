# pyright: basic
# torch and vLLM are typed only in part.
"""Deltas inside one of vLLM's workers: attach, stage, apply, take back. `vllm_weights.py` offers it to the front end.

Invariants:
- Attached once, while the model holds a checkpoint that can be read; the canary has passed, or nothing is ever staged.
- No method raises: each answers with a status, because vLLM hands one worker's error to a later call.
- `stage` works in a thread of its own and only reads the model; `apply` and `revert` write in the worker's own.
- An answer that is not SERVING leaves the old version served, except FAILED with digest 0: then nothing may be served
  until a full update succeeds.
"""

import hashlib
import importlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from headrace.actors.rollout.checkpoint import read_shapes
from headrace.actors.rollout.loader_trace import trace_loader
from headrace.actors.rollout.weight_canary import check_reload, check_scatter
from headrace.actors.rollout.weight_map import CheckpointTensors, WeightMap, build_weight_map
from headrace.actors.rollout.weight_probe import first_ids, probe_input, run_plain_module
from headrace.actors.rollout.weight_scatter import StagedUpdate, WeightScatter
from headrace.actors.rollout.weight_shadow import OpaqueShadow, Reload
from headrace.engine.errors import CorruptUpdateError, WeightUpdateError
from headrace.engine.types import AckStatus
from headrace.engine.weights.changes import ChangeFile, read_changes

_LOG = logging.getLogger(__name__)

# An AckStatus, a message, and the digest of what is served.
Answer = list[Any]

# While these go wrong, the model may become a mixture.
_WRITING = ("applied", "taken back")


class DeltaReceiver:
    """Applies change files to one worker's model."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
        """Remember the model; `attach` does the work."""
        self._model = model
        self._config = vllm_config
        self._device = device
        self._map: WeightMap | None = None
        self._scatter: WeightScatter | None = None
        self._shadow: OpaqueShadow | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="headrace-stage")
        self._staging: Future[tuple[StagedUpdate, int]] | None = None
        self._applied: tuple[StagedUpdate, int] | None = None
        self.digest = 0

    def attach(self, folder: str = "") -> Answer:
        """Map the model and run the canary; blocks for a read of the checkpoint, and nothing may be generated.

        Args:
            folder: The checkpoint that the model holds now; by default the one that vLLM was started with.

        Returns:
            SERVING and a line on what was mapped, or UNKNOWN_LAYOUT and why deltas cannot be taken.
        """
        return self._answered(lambda: self._attach(Path(folder or self._config.model_config.model)), "attached")

    def stage(self, message: bytes) -> Answer:
        """Begin to prepare a change file (an encoded `ChangeFile`); returns at once. `staged` tells the outcome."""
        if self._scatter is None:
            return [int(AckStatus.UNKNOWN_LAYOUT), "This worker takes no deltas: it was not attached.", self.digest]
        self._staging = self._pool.submit(self._stage, self._scatter, message)
        return [int(AckStatus.SERVING), "", self.digest]

    def staging(self) -> bool:
        """Whether it is still being prepared; returns at once, so that the worker can go on generating meanwhile."""
        return self._staging is not None and not self._staging.done()

    def staged(self) -> Answer:
        """Wait until the staged update is ready; why it is refused, if it is."""
        return self._answered(lambda: self._await_staged() and "", "staged")

    def apply(self) -> Answer:
        """Store the staged update. Call it in a pause. Answers with the update's digest."""
        return self._answered(self._apply, "applied")

    def revert(self) -> Answer:
        """Take the last applied update back. Call it in a pause. Answers with the digest before it."""
        return self._answered(self._revert, "taken back")

    def state_digest(self) -> str:
        """SHA-256 of all parameters and buffers with their names; reads all of them."""
        total = hashlib.sha256()
        for name, tensor in sorted([*self._model.named_parameters(), *self._model.named_buffers()]):
            total.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
            if tensor.numel():
                total.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().data)
        return total.hexdigest()

    def after_full_update(self, tensors: Mapping[str, torch.Tensor], digest: int) -> None:
        """A full update replaced everything: forget what was staged, and keep the copies of opaque tensors in step."""
        self._staging = self._applied = None
        self.digest = digest
        if self._map is None:
            return
        if self._shadow is not None:
            self._shadow.replace({name: value for name, value in tensors.items() if name in self._shadow.names})
        self._scatter = WeightScatter(self._map, self._shadow)

    def close(self) -> None:
        """End the staging thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _answered(self, act: Callable[[], str], what: str) -> Answer:
        try:
            with set_current_vllm_config(self._config), torch.no_grad():
                message = act()
            return [int(AckStatus.SERVING), message, self.digest]
        except (CorruptUpdateError, msgspec.MsgspecError) as error:
            return [int(AckStatus.CORRUPT), str(error), self.digest]
        except WeightUpdateError as error:
            status = AckStatus.UNKNOWN_LAYOUT if self._scatter is None else AckStatus.FAILED
            return [int(status), str(error), self.digest]
        except Exception as error:
            _LOG.exception("A weight update could not be %s.", what)
            if what in _WRITING:
                self.digest = 0
            return [int(AckStatus.FAILED), f"{type(error).__name__}: {error}", self.digest]

    def _attach(self, folder: Path) -> str:
        if getattr(self._config.model_config, "use_mla", False):
            raise WeightUpdateError("Latent attention keeps derived weights; send full updates or restart.")
        read = CheckpointTensors(folder)
        names = read_shapes(folder)
        layout = {name: spec for name, spec in read.layout(self._config.model_config.dtype).items() if name in names}
        model: Any = self._model
        trace = trace_loader(model, model.load_weights, layout)
        found = build_weight_map(model, trace, layout, read, opaque_module=opaque_module)
        if not found.regions and not found.opaque:
            raise WeightUpdateError(f"Nothing of {folder} lies in this worker's model.")
        reload = self._reload(found)
        shadow = OpaqueShadow.from_checkpoint(found, read, reload) if found.opaque else None
        run = check_scatter(model, found, read, run=run_module, reload=reload)
        if shadow is not None:
            check_reload(model, found, shadow)
        self._map, self._shadow, self._scatter = found, shadow, WeightScatter(found, shadow)
        return f"{found.summary()}; {len(run)} modules probed"

    def _reload(self, weight_map: WeightMap) -> Reload:
        """Load names through vLLM's loader, and where modules are known, through its layer-wise processing."""
        model: Any = self._model
        layerwise: Any = importlib.import_module("vllm.model_executor.model_loader.reload")
        shared = {m for storage in weight_map.storages if len(storage.modules) > 1 for m in storage.modules}

        def reload(weights: Mapping[str, torch.Tensor]) -> None:
            modules = {m for name in weights for m in _modules_of(weight_map, name)} - shared
            layers = [model.get_submodule(path) for path in sorted(modules)]
            with set_current_vllm_config(self._config), torch.no_grad():
                for layer in layers:
                    layerwise.initialize_layerwise_reload(layer)
                try:
                    model.load_weights(iter(weights.items()))
                finally:
                    for layer in layers:
                        layerwise.finalize_layerwise_reload(layer, self._config.model_config)

        return reload

    def _stage(self, scatter: WeightScatter, message: bytes) -> tuple[StagedUpdate, int]:
        file = msgspec.msgpack.decode(message, type=ChangeFile)
        with torch.no_grad():
            staged = scatter.stage(read_changes(file))
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        return staged, file.digest

    def _await_staged(self) -> tuple[StagedUpdate, int]:
        if self._staging is None:
            raise WeightUpdateError("No update was staged.")
        return self._staging.result()

    def _apply(self) -> str:
        # What may be taken back from here on is this update, never the one before.
        self._applied = None
        staged, digest = self._await_staged()
        assert self._scatter is not None
        self._staging = None
        self._scatter.apply(staged)
        self._synchronize()
        self._applied = (staged, self.digest)
        self.digest = digest
        return ""

    def _revert(self) -> str:
        if self._applied is None or self._scatter is None:
            raise WeightUpdateError("No update is there to be taken back.")
        staged, digest = self._applied
        self._applied = None
        self._scatter.undo(staged)
        self._synchronize()
        self.digest = digest
        return ""

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def opaque_module(path: str, module: torch.nn.Module) -> str:
    """Why the parameters of one of vLLM's modules are not what it computes with, or nothing."""
    if "FusedMoE" in type(module).__name__ or "Experts" in type(module).__name__:
        return "fused experts may lie in another order after loading"
    method = type(getattr(module, "quant_method", None)).__name__
    if method != "NoneType" and not method.startswith("Unquantized"):
        return f"quantised ({method})"
    return ""


def run_module(module: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Run a linear layer, an embedding (also as an output head) or a norm of vLLM, without communication."""
    weight = getattr(module, "weight", None)
    method: Any = getattr(module, "quant_method", None)
    if not isinstance(weight, torch.Tensor):
        return ()
    if isinstance(module, VocabParallelEmbedding):
        rows = method.embedding(module, first_ids(weight))
        return rows, method.apply(module, probe_input(rows.shape[-1], rows))
    if isinstance(module, LinearBase):
        width = getattr(module, "input_size_per_partition", module.input_size)
        return (method.apply(module, probe_input(width, weight), getattr(module, "bias", None)),)
    return run_plain_module(module) if weight.dim() == 1 else ()


def _modules_of(weight_map: WeightMap, name: str) -> frozenset[str]:
    if name in weight_map.groups:
        return weight_map.groups[name]
    regions = weight_map.regions.get(name, ())
    return frozenset[str]().union(*(weight_map.storages[region.storage].modules for region in regions))


def changes_message(file: ChangeFile) -> bytes:
    """The control message for `DeltaReceiver.stage`."""
    return msgspec.msgpack.encode(file)
