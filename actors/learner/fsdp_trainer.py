# pyright: basic
# transformers and torch are only partly typed.
"""The FSDP2 trainer: sharded master weights, one update a batch.

Invariants:
- Losses are divided by the step's loss tokens over all ranks; as FSDP averages gradients over ranks, each rank's loss
  is multiplied by their number. So neither the cut into micro-batches nor the number of ranks changes the update.
- Every rank runs the same number of passes, and gradients are reduced once, in the last backward pass.
- Whether a step is skipped is decided on reduced numbers. The version counts skipped steps too.
- Nothing is drawn at random: the model stays in evaluation mode, so dropout is off, as it was when sampling.
"""

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from headrace.actors.learner.controllers import Bounds, KlLearningRate
from headrace.actors.learner.forward import PackedForward
from headrace.actors.learner.host_memory import give_back_freed
from headrace.actors.learner.objective import Objective
from headrace.actors.learner.optimizer import ShardedAdamW
from headrace.actors.learner.sharding import RankGroup, choose_device, reshard_model, shard_model
from headrace.actors.learner.step_sums import StepSums
from headrace.actors.learner.trainer_state import TrainerState, load_state, save_state
from headrace.actors.learner.weight_export import WeightExporter, canonical_parameters
from headrace.actors.models import checkpoint_tensor_names, load_causal_lm, load_tokenizer
from headrace.engine.config.hardware import model_dtype
from headrace.engine.config.schema import Config
from headrace.engine.errors import InputError, NonFiniteStreakError
from headrace.engine.interfaces import Algorithm, StagedUpdate
from headrace.engine.types import MicroBatch, PolicyVersion, StepBatch, StepResult, WeightUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = Any

logger = logging.getLogger(__name__)

_FIRST_VERSION = PolicyVersion(0, 0)
# How far a rate that follows the KL may leave its schedule.
_RATE_FACTORS = Bounds(low=0.01, high=10.0)


class FsdpTrainer:
    """Implements `headrace.engine.interfaces.TrainerBackend`; each method is collective. Not for several threads."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: Config,
        model_dir: Path,
        algorithm: Algorithm,
        group: RankGroup,
        run_id: str,
        version: PolicyVersion,
    ) -> None:
        """Takes an unsharded float32 model on the CPU; `from_config` is the usual way here."""
        self._config = config
        self._model_dir = model_dir
        self._group = group
        self._version = version
        self._streak = 0
        model.train(False)
        self._model = model
        self._forward = PackedForward(self._model, group.device)
        self._objective = Objective(algorithm, self._forward, config=config, model_dir=model_dir, group=group)
        self._parameters = shard_model(self._model, group, config.learner)
        self._optimizer = ShardedAdamW(self._parameters, config.learner)
        self._rate: KlLearningRate | None = None
        if config.learner.kl_target > 0:
            self._rate = KlLearningRate(initial=1.0, target=config.learner.kl_target, bounds=_RATE_FACTORS)
        canonical = canonical_parameters(self._model, self._parameters, checkpoint_tensor_names(model_dir))
        self._exporter = WeightExporter(canonical, config=config, run_id=run_id, group=group)
        if not self._forward.verify_isolation():
            logger.warning("%s does not keep packed sequences apart: each takes a row of its own", model_dir.name)
        reshard_model(self._model)

    @classmethod
    def from_config(
        cls,
        config: Config,
        model_dir: Path,
        *,
        algorithm: Algorithm,
        rank: int,
        num_ranks: int,
        init_method: str,
        device: str | None = None,
        run_id: str | None = None,
        version: PolicyVersion = _FIRST_VERSION,
    ) -> "FsdpTrainer":
        """Load, shard and check a model; blocks until all ranks have met.

        Args:
            config: The run's configuration.
            model_dir: What `resolve_model` returned.
            algorithm: Its loss runs here.
            rank: This process.
            num_ranks: All of them.
            init_method: Where the ranks meet, for example `file:///folder/that/exists/name`; unused where a process
                group is there already.
            device: "cpu", "cuda" or "auto"; default `learner.device`.
            run_id: Stands in weight manifests; default the run's name.
            version: Of the weights in `model_dir`.

        Raises:
            ConfigError: The configuration asks for what this trainer cannot do, or the model cannot be loaded.
        """
        if config.learner.threads:
            torch.set_num_threads(config.learner.threads)
        group = RankGroup(
            rank=rank,
            num_ranks=num_ranks,
            init_method=init_method,
            device=choose_device(device or config.learner.device, rank),
            timeout_s=config.learner.step_timeout_s,
        )
        try:
            return cls(
                load_causal_lm(model_dir, "float32"),
                config=config,
                model_dir=model_dir,
                algorithm=algorithm,
                group=group,
                run_id=config.run.name if run_id is None else run_id,
                version=version,
            )
        except BaseException:
            group.close()
            raise

    @property
    def version(self) -> PolicyVersion:
        """Of the weights that this trainer holds."""
        return self._version

    @property
    def sharing_hidden_size(self) -> int:
        """The model's hidden size where it computes the prompt of a group once within a micro-batch, else 0."""
        return self._model.config.get_text_config().hidden_size if self._forward.mode == "auto" else 0

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> npt.NDArray[np.float32]:
        """Current log-probabilities, float32 [N], at each sequence's temperature; 0 where loss_mask is 0."""
        try:
            return self._forward(micro_batch).logprobs.cpu().numpy()
        finally:
            reshard_model(self._model)

    def step(self, batch: StepBatch) -> StepResult:
        """One update over all micro-batches; returns the version after it, batch.step + 1.

        Raises:
            InputError: The step lies in the past, or there is no micro-batch.
            NonFiniteStreakError: The configured number of steps in a row was skipped for gradients that are not finite.
        """
        if batch.step < self._version.version or not batch.micro_batches:
            raise InputError(
                f"step {batch.step} with {len(batch.micro_batches)} micro-batches was given to a trainer at version "
                f"{self._version}: steps go forward, and each has at least one micro-batch"
            )
        if batch.num_loss_tokens == 0:  # of all ranks, so all of them skip
            logger.warning("step %d has no loss token: skipped", batch.step)
            return self._finish(batch, {"actor/lr": self._optimizer.next_rate}, skipped=True)
        sums = self._accumulate(batch)
        norm, metrics = sums.reduce(self._group, self._optimizer.squared_norm(), batch.num_loss_tokens)
        metrics["actor/lr"] = self._optimizer.next_rate
        if sums.factor == 0:
            self._optimizer.discard()
            logger.warning(
                "step %d skipped: all of its %d loss tokens were rejected", batch.step, batch.num_loss_tokens
            )
            return self._finish(batch, metrics, skipped=True)
        updated = self._optimizer.apply(norm, factor=sums.factor)
        self._streak = 0 if updated else self._streak + 1
        if updated:
            metrics |= self._objective.stepped(metrics)
            self._steer_rate(metrics)
        else:
            self._report_skip(batch, sums)
        return self._finish(batch, metrics, skipped=not updated)

    def export_update(self, since: PolicyVersion | None, payload_dir: Path) -> WeightUpdate:
        """Write this rank's shards in `model.dtype`, in full or as a delta from `since`; see `TrainerBackend`."""
        return self.stage_update(since).write(payload_dir)

    def stage_update(self, since: PolicyVersion | None) -> StagedUpdate:
        """Copy this rank's shards, to be written and published while the next step runs; see `OverlappedTrainer`."""
        return self._exporter.stage(self._version, since)

    def save(self, folder: Path) -> None:
        """Write weights, moments, schedule and version below `folder`; returns when they are on disk.

        There is no generator to save: nothing is drawn at random.

        Raises:
            OSError: The disk is full or not writable.
        """
        state = TrainerState(
            version=self._version.version,
            updates=self._optimizer.updates,
            nonfinite_streak=self._streak,
            controllers=self._controllers(),
        )
        save_state(folder, self._tensors(), state, self._group)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, on any number of ranks. The incarnation stays this trainer's own.

        Raises:
            FormatError: The folder is not a complete checkpoint of this model.
        """
        state = load_state(folder, self._tensors())
        self._optimizer.restore_updates(state.updates)
        self._streak = state.nonfinite_streak
        self._objective.restore(state.controllers)
        if self._rate is not None and "rate_factor" in state.controllers:
            self._rate.restore(state.controllers["rate_factor"])
            self._optimizer.rate_factor = self._rate.rate
        self._version = self._version._replace(version=state.version)
        self._exporter.reset()

    def export_hf(self, folder: Path) -> None:
        """Write the model as a transformers checkpoint in `model.dtype`, with its tokenizer; rank 0 writes.

        Gathers whole parameters, one at a time, onto rank 0's CPU.
        """
        dtype = getattr(torch, model_dtype(self._config))
        state: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if self._group.rank == 0:
                state[name] = whole.detach().to("cpu", dtype)
        if self._group.rank == 0:
            plain = load_causal_lm(self._model_dir, model_dtype(self._config))
            plain.load_state_dict(state, strict=False)
            plain.tie_weights()
            plain.save_pretrained(folder)
            load_tokenizer(self._model_dir).save_pretrained(folder)
        self._group.barrier()

    def close(self) -> None:
        """Leave the process group if this trainer made it. May be called twice."""
        self._forward.close()
        self._objective.close()
        self._group.close()

    def _accumulate(self, batch: StepBatch) -> StepSums:
        sums, last = StepSums(), len(batch.micro_batches) - 1
        for index, micro_batch in enumerate(batch.micro_batches):
            # With one rank nothing is sent, and whole gradients that wait for the last pass would only take room.
            cast(FSDPModule, self._model).set_requires_gradient_sync(index == last or self._group.num_ranks == 1)
            result, output = self._objective(micro_batch, batch)
            sums.add(micro_batch, result, output)
            torch.autograd.backward(output.loss * self._group.num_ranks)
        return sums

    def _steer_rate(self, metrics: dict[str, float]) -> None:
        """What an update did to the policy shows in the gap between sampler and learner some steps later."""
        if self._rate is not None:
            self._optimizer.rate_factor = self._rate.update(metrics.get("mismatch_kl/mean", math.nan))

    def _report_skip(self, batch: StepBatch, sums: StepSums) -> None:
        records = sums.suspects or [name for micro_batch in batch.micro_batches for name in micro_batch.record_ids]
        logger.warning(
            "step %d skipped, its gradient is not finite (%d in a row); records of rank %d: %s",
            batch.step,
            self._streak,
            self._group.rank,
            ", ".join(name for name in records if name) or "none",
        )

    def _finish(self, batch: StepBatch, metrics: dict[str, float], *, skipped: bool) -> StepResult:
        self._version = self._version._replace(version=batch.step + 1)
        if self._group.device.type == "cpu":
            give_back_freed()
        limit = self._config.learner.max_nonfinite_steps
        if self._streak >= limit:
            raise NonFiniteStreakError(
                f"{self._streak} steps in a row had gradients that are not finite, learner.max_nonfinite_steps allows "
                f"{limit}: lower learner.learning_rate, or look at the records named in the log"
            )
        return StepResult(version=self._version, skipped=skipped, metrics=metrics)

    def _controllers(self) -> dict[str, float]:
        rate = {} if self._rate is None else {"rate_factor": self._rate.state()}
        return {**self._objective.state(), **rate}

    def _tensors(self) -> dict[str, torch.Tensor]:
        weights = {f"model.{name}": parameter.detach() for name, parameter in self._parameters.items()}
        return {**weights, **{f"optimizer.{name}": tensor for name, tensor in self._optimizer.tensors().items()}}
