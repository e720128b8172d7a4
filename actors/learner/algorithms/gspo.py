"""GSPO: ratio, clip and mean of whole sequences (arXiv 2507.18071, equations 5 and 7, in the token form of 13 and 14).

    s_i = exp( sum_t (current - old) / |y_i| )        loss = mean over sequences of max(-A_i s_i, -A_i clip(s_i))

with GRPO's credit A_i. The clip range is `sequence_clip_low` and `sequence_clip_high`: a mean over a sequence moves far
less than one of its tokens.

The paper's old policy is the sampler. Here s_i is taken in two parts, sampler to proximal policy (the importance
weight, truncated) and proximal to current policy (the clipped ratio), so the weight is one of sequences as well: the
geometric mean, or the product with `importance.level = "product"`. A weight of tokens would be another method, so
"token" (the default) reads as "sequence".
"""

import msgspec

from headrace.actors.learner.algorithms.grpo import Grpo
from headrace.actors.learner.algorithms.rollout_method import ROLLOUT_KEYS
from headrace.engine.config import AlgorithmConfig
from headrace.engine.interfaces import LossInputs, LossOutput


class Gspo(Grpo):
    """Group-relative credit and the clipped loss of sequences, as a mean over sequences."""

    name = "gspo"
    reads = ROLLOUT_KEYS | {"sequence_clip_low", "sequence_clip_high", "dual_clip"}
    unit = "sequence"

    def resolve(self, config: AlgorithmConfig) -> AlgorithmConfig:
        """The range of sequences as the loss's clip range, and weights of sequences."""
        resolved = super().resolve(config)
        level = "product" if config.importance.level == "product" else "sequence"
        return msgspec.structs.replace(
            resolved,
            clip_low=config.sequence_clip_low,
            clip_high=config.sequence_clip_high,
            importance=msgspec.structs.replace(config.importance, level=level),
        )

    def loss(self, inputs: LossInputs) -> LossOutput:
        """The clipped loss of one micro-batch's sequences, divided by the step's counts."""
        from headrace.actors.learner.losses.gspo import gspo_loss

        return gspo_loss(inputs, self.loss_options())
