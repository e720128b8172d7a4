"""On-policy distillation: the student's own responses, each token judged by a teacher (arXiv 2306.13649; MiniLLM, arXiv
2306.08543, equation 2).

    A_t = log p_teacher - log p_student        at each token, the student's detached

The expected gradient is that of KL(student || teacher) at each state the student visits. No reward is read: each sample
counts the same, so its scalar credit is 1 and the difference is formed in the loss, from the policy that is trained.
"""

import numpy as np
import numpy.typing as npt

from headrace.actors.learner.advantages.domain import finite_rewards
from headrace.actors.learner.algorithms.rollout_method import CLIP_KEYS, ROLLOUT_KEYS, Credit, RolloutMethod
from headrace.engine.interfaces import LossInputs, LossOutput


class Distillation(RolloutMethod):
    """A teacher's log-probabilities instead of rewards, as a mean over the step's tokens."""

    name = "distillation"
    reads = (ROLLOUT_KEYS - {"shaping", "dynamic_sampling"}) | CLIP_KEYS
    min_group_size = 1
    credit_by_token = True
    columns = ("teacher_logprobs",)

    def credit(self, rewards: npt.NDArray[np.float64]) -> Credit:
        """1 for each sample, float32 [G]: rewards are checked and not read."""
        return np.ones(finite_rewards(rewards).shape, np.float32)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """The divergence from the teacher on one micro-batch, divided by the step's counts."""
        from headrace.actors.learner.losses.distillation import distillation_loss

        return distillation_loss(inputs, self.loss_options())
