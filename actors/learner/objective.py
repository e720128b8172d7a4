# pyright: basic
# torch is only partly typed.
"""What a step minimises: the loss of the algorithm over scores of the current model, with a reference if it needs one.

Invariants:
- The KL coefficient is the same for all micro-batches and ranks of a step; it moves between steps, by a reduced number.
- With one update a batch the proximal policy is the detached current one, so nothing is scored twice.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.actors.learner.controllers import AdaptiveKl
from headrace.actors.learner.forward import ForwardResult, PackedForward
from headrace.actors.learner.loss_inputs import TensorLossInputs
from headrace.actors.learner.reference import ReferenceModel
from headrace.actors.learner.sharding import RankGroup
from headrace.engine.config.schema import Config
from headrace.engine.interfaces import Algorithm, LossOutput
from headrace.engine.types import MicroBatch, StepBatch


class Objective:
    """Loss of micro-batches, one forward pass of the trained model each. Every call is collective."""

    def __init__(
        self, algorithm: Algorithm, forward: PackedForward, *, config: Config, model_dir: Path, group: RankGroup
    ) -> None:
        """Load the reference model where the algorithm reads it.

        Raises:
            ConfigError: The reference model cannot be loaded.
        """
        self._algorithm = algorithm
        self._forward = forward
        self._kl_coef = config.algorithm.kl_coef
        self._adaptive: AdaptiveKl | None = None
        target = config.algorithm.kl.target
        if self._kl_coef > 0 and target > 0:
            self._adaptive = AdaptiveKl(initial=self._kl_coef, target=target, horizon=config.algorithm.kl.horizon)
        reads_reference = "reference_logprobs" in algorithm.traits.columns
        self._reference = ReferenceModel(config, model_dir, group) if reads_reference else None

    @property
    def kl_coef(self) -> float:
        """The weight of the KL term in the next step."""
        return self._kl_coef if self._adaptive is None else self._adaptive.coef

    def __call__(self, micro_batch: MicroBatch, batch: StepBatch) -> tuple[ForwardResult, LossOutput]:
        """Score one micro-batch of a step and give its part of the loss."""
        if self._reference is not None:
            micro_batch = self._reference.with_logprobs(micro_batch)
        result = self._forward(micro_batch)
        inputs = TensorLossInputs.build(
            micro_batch,
            logprobs=result.logprobs,
            entropy=result.entropy if self._algorithm.traits.needs_entropy else None,
            advantages=self._algorithm.token_advantages(micro_batch),
            num_loss_tokens=batch.num_loss_tokens,
            num_sequences=batch.num_sequences,
            num_groups=batch.num_groups,
            kl_coef=self.kl_coef,
        )
        return result, self._algorithm.loss(inputs)

    def stepped(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """After an update: move the KL coefficient by the step's reduced figures; returns what was in force."""
        if not self._kl_coef:
            return {}
        used = self.kl_coef
        if self._adaptive is not None:
            self._adaptive.update(metrics.get("actor/kl", math.nan))
        return {"actor/kl_coef": used}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"kl_coef": self.kl_coef} if self._adaptive is not None else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved state; a coefficient that the configuration has fixed stays as configured."""
        if self._adaptive is not None and "kl_coef" in state:
            self._adaptive.restore(float(state["kl_coef"]))

    def close(self) -> None:
        """Let the reference model go. May be called twice."""
        if self._reference is not None:
            self._reference.close()
            self._reference = None
