# pyright: basic
# torch and vLLM are typed only in part.
"""Weight updates inside vLLM's workers.

Two steps, so that an update that does not fit changes nothing anywhere: every worker *prepares* (maps the payload and
compares it with the checkpoint that it serves), and only when all of them agree does every worker *load*.

Invariants:
- A worker method never raises: with several workers vLLM hands one worker's error to a later call. It returns a status.
- No parameter is touched before the whole update has been checked against the served layout.
- A load that fails half-way is reported as such; the front end then stops serving until a full update succeeds.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from headrace.actors.rollout.checkpoint import layout_difference, read_shapes
from headrace.actors.rollout.vllm_delta import DeltaReceiver
from headrace.actors.rollout.vllm_engine import decode_update
from headrace.engine.errors import HeadraceError, WeightUpdateError
from headrace.engine.types import AckStatus, TensorSpec
from headrace.engine.weights.payload import RawArray, open_payload

_LOG = logging.getLogger(__name__)

# Of one parameter, to make sure that it holds what was loaded.
_COMPARED_ELEMENTS = 1 << 16

# What a worker answers: an AckStatus, a message, and the digest of what it serves (0: nothing applied yet).
Answer = list[Any]
Payload = Mapping[str, tuple[TensorSpec, RawArray]]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A prepared update; the mapping stays valid whatever happens to the file's name."""

    digest: int
    payload: Payload


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be set up."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One update, as `vllm_engine.encode_update` writes it."""

    message: bytes = b""


class HeadraceTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads full updates in place. Used through `WeightReceiver`, or through vLLM's own weight-transfer calls.

    vLLM's own calls return nothing, so `answer` keeps the last status for `WeightReceiver.headrace_answer`.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._pending: _Pending | None = None
        self._digest = 0
        self.deltas = DeltaReceiver(model, vllm_config, device)
        self.answer: Answer = [int(AckStatus.SERVING), "", 0]

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do: parameters change in place."""

    def finish_weight_update(self) -> None:
        """Nothing to do: parameters change in place."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, without waiting for an accelerator that may not be there."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Prepare and load; the outcome is in `answer`. Use `prepare` and `load` where several workers must agree."""
        self.answer = self.prepare(update_info.message)
        if self.answer[0] == AckStatus.SERVING:
            self.answer = self.load()

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """Not used: payloads are files, written by `KeyframeWriter`."""
        raise WeightUpdateError("Weights are published as payload files; nothing is sent through vLLM.")

    def shutdown(self) -> None:
        """Forget a prepared update."""
        self._pending = None
        self.deltas.close()

    def prepare(self, message: bytes) -> Answer:
        """Map the payload and compare it with what is served; touches no parameter. Does not read the payload."""
        self._pending = None
        try:
            update = decode_update(message)
            reason = self._unsupported() or layout_difference(update.manifest, read_shapes(self._model_dir()))
            if reason:
                return [int(AckStatus.UNKNOWN_LAYOUT), reason, self._digest]
            pending = _Pending(update.manifest.digest, open_payload(update))
        except (HeadraceError, msgspec.MsgspecError, OSError) as error:
            return [int(AckStatus.CORRUPT), str(error), self._digest]
        except Exception as error:
            _LOG.exception("A weight update could not be prepared.")
            return [int(AckStatus.FAILED), f"{type(error).__name__}: {error}", self._digest]
        self._pending = pending
        return [int(AckStatus.SERVING), "", self._digest]

    def load(self) -> Answer:
        """Copy the prepared update into the parameters. FAILED means that they may be a mixture now."""
        pending, self._pending = self._pending, None
        if pending is None:
            return [int(AckStatus.FAILED), "No update was prepared.", self._digest]
        try:
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                model: Any = self.model
                loaded = model.load_weights(_tensors(pending.payload))
            missing = self._without_value(loaded)
            if missing:
                raise WeightUpdateError(f"{len(missing)} parameters got no value, first {missing[0]!r}.")
            self._verify_loaded(pending.payload)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:
            _LOG.exception("A weight update failed while it was loaded.")
            self._digest = 0
            return [int(AckStatus.FAILED), f"{type(error).__name__}: {error}", 0]
        self._digest = pending.digest
        self.deltas.after_full_update(dict(_tensors(pending.payload)), pending.digest)
        return [int(AckStatus.SERVING), "", self._digest]

    def _model_dir(self) -> Path:
        return Path(self.vllm_config.model_config.model)

    def _unsupported(self) -> str:
        """Why in-place loading would be silently wrong for this model, or nothing."""
        config = self.vllm_config.model_config
        if config.quantization is not None:
            return f"The served model is quantised ({config.quantization}); updates of it are not supported."
        if getattr(config, "use_mla", False):
            return "The served model has latent attention, which keeps derived weights; updates are not supported."
        for module in self.model.modules():
            if "FusedMoE" in type(module).__name__:
                return "The served model has fused experts, whose layout changes after loading; not supported."
        if current_platform.is_cpu():
            import vllm._custom_ops

            if vllm._custom_ops._supports_onednn:
                return "The plugin headrace was not loaded in vLLM's worker (see VLLM_PLUGINS), so weights are packed."
        return ""

    def _without_value(self, loaded: set[str] | None) -> list[str]:
        if loaded is None:
            return []
        return sorted(name for name, _ in self.model.named_parameters() if name not in loaded)

    def _verify_loaded(self, payload: Payload) -> None:
        """Compare the parameters that keep their checkpoint name and shape (norms, embeddings, ...), bit for bit.

        Of large ones a regular sample, because generation stands still meanwhile. Fused and sliced parameters have no
        such name. A difference means that vLLM's loader wrote elsewhere.
        """
        parameters = dict(self.model.named_parameters())
        for name, value in _tensors(payload):
            parameter = parameters.get(name)
            if parameter is None or parameter.shape != value.shape or parameter.dtype != value.dtype:
                continue
            step = max(1, value.numel() // _COMPARED_ELEMENTS)
            served = parameter.detach().reshape(-1)[::step].contiguous().cpu()
            if not torch.equal(served.view(_bits(value)), value.reshape(-1)[::step].contiguous().view(_bits(value))):
                raise WeightUpdateError(f"{name!r} differs from the update after loading.")


class WeightReceiver:
    """Mixed into vLLM's worker class; called by `collective_rpc`. Only the names below are added."""

    weight_transfer_engine: Any

    def headrace_prepare(self, message: bytes) -> Answer:
        """See `HeadraceTransferEngine.prepare`."""
        answer: Answer = self.weight_transfer_engine.prepare(message)
        return answer

    def headrace_load(self) -> Answer:
        """See `HeadraceTransferEngine.load`."""
        answer: Answer = self.weight_transfer_engine.load()
        return answer

    def headrace_answer(self) -> Answer:
        """The outcome of the last update that came through vLLM's own calls."""
        answer: Answer = self.weight_transfer_engine.answer
        return answer

    def headrace_attach(self, folder: str = "") -> Answer:
        """See `DeltaReceiver.attach`; so the following ones."""
        return self._deltas().attach(folder)

    def headrace_stage(self, message: bytes) -> Answer:
        """Begin to prepare a change file."""
        return self._deltas().stage(message)

    def headrace_staging(self) -> bool:
        """Whether it is still being prepared."""
        return self._deltas().staging()

    def headrace_staged(self) -> Answer:
        """Wait for it."""
        return self._deltas().staged()

    def headrace_apply(self) -> Answer:
        """Store it."""
        return self._deltas().apply()

    def headrace_revert(self) -> Answer:
        """Take the last one back."""
        return self._deltas().revert()

    def headrace_digest(self) -> str:
        """SHA-256 of all parameters and buffers."""
        return self._deltas().state_digest()

    def _deltas(self) -> DeltaReceiver:
        deltas: DeltaReceiver = self.weight_transfer_engine.deltas
        return deltas


def _bits(tensor: torch.Tensor) -> torch.dtype:
    # Bits, not values: a NaN equals itself, and -0.0 is not 0.0.
    return torch.int16 if tensor.element_size() == 2 else torch.int32


def _tensors(payload: Payload) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (spec, raw) in payload.items():
        with warnings.catch_warnings():
            # torch has no read-only tensors and warns; loaders only read what they are given.
            warnings.simplefilter("ignore", UserWarning)
            bits = torch.from_numpy(raw.view(np.int16 if raw.itemsize == 2 else np.int32))
        yield name, bits.view(getattr(torch, spec.dtype))
