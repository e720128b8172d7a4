# pyright: basic
# transformers and torch are only partly typed.
"""The frozen reference policy of a KL term: the model that the run began with, sharded like the trained one.

It is as large as the trained model's low-precision copy and has neither gradients nor moments.
"""

from pathlib import Path

import msgspec
import torch

from headrace.actors.learner.forward import PackedForward
from headrace.actors.learner.sharding import RankGroup, reshard_model, shard_model
from headrace.actors.models import load_causal_lm
from headrace.engine.config.hardware import model_dtype
from headrace.engine.config.schema import Config
from headrace.engine.types import MicroBatch


class ReferenceModel:
    """Scores micro-batches under the model in `model_dir`, never updated. Each call is collective."""

    def __init__(self, config: Config, model_dir: Path, group: RankGroup) -> None:
        """Load, shard and check the model; all ranks must call it.

        Raises:
            ConfigError: The model cannot be loaded.
        """
        self._model = load_causal_lm(model_dir, model_dtype(config))
        self._model.requires_grad_(False)
        self._model.train(False)
        self._forward = PackedForward(self._model, group.device)
        shard_model(self._model, group, config.learner)
        self._forward.verify_isolation()
        reshard_model(self._model)

    @torch.no_grad()
    def with_logprobs(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch with its `reference_logprobs` column, float32 [N], at each sequence's temperature."""
        logprobs = self._forward(micro_batch).logprobs.cpu().numpy()
        reshard_model(self._model)
        return msgspec.structs.replace(micro_batch, reference_logprobs=logprobs)

    def close(self) -> None:
        """Remove the hook. May be called twice."""
        self._forward.close()
