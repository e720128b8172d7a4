"""CISPO: the weight is clipped, the gradient is not (MiniMax-M1, arXiv 2506.13585, equations 4 and 5).

    loss of a token = -clip(r, 0, 1 + clip_high) * A_i * log p,   the weight r detached

with GRPO's credit A_i and the mean over all tokens of the step. A clipped token still has a gradient, so rare tokens
that begin a new thought keep teaching. The paper sets no lower bound, so `clip_low` is not read.

The paper's r goes from the sampler to the current policy. Here the part from sampler to proximal policy is the
importance weight, so with one update a batch it is `importance.cap` that bounds it, and r is exactly 1.
"""

import msgspec

from headrace.actors.learner.algorithms.grpo import Grpo
from headrace.actors.learner.algorithms.rollout_method import ROLLOUT_KEYS
from headrace.engine.config import AlgorithmConfig
from headrace.engine.interfaces import LossInputs, LossOutput


class Cispo(Grpo):
    """Group-relative credit and REINFORCE with a clipped weight, as a mean over the step's tokens."""

    name = "cispo"
    reads = ROLLOUT_KEYS | {"clip_high"}

    def resolve(self, config: AlgorithmConfig) -> AlgorithmConfig:
        """A weight has no lower bound but 0."""
        return msgspec.structs.replace(super().resolve(config), clip_low=1.0)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """The weighted log-probabilities of one micro-batch, divided by the step's counts."""
        from headrace.actors.learner.losses.cispo import cispo_loss

        return cispo_loss(inputs, self.loss_options())
