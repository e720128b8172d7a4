"""GRPO: each response against the others of its prompt (DeepSeekMath, arXiv 2402.03300, equation 3 and section 4.1.2).

    A_i = (r_i - mean(r)) / std(r)        one number a response, given to each of its tokens

with the clipped loss of the tokens. The paper takes the mean over each response and then over responses
(`normalization = "sequence"`), which makes a token of a long wrong answer cheaper than one of a short; the default here
is the mean over all tokens of the step, without that bias.
"""

import numpy as np
import numpy.typing as npt

from headrace.actors.learner.advantages.group_relative import group_relative_advantages
from headrace.actors.learner.algorithms.rollout_method import Credit, RolloutMethod


class Grpo(RolloutMethod):
    """Group-relative credit and the clipped policy loss as a mean over the step's tokens."""

    name = "grpo"

    def credit(self, rewards: npt.NDArray[np.float64]) -> Credit:
        """The rewards, centred and divided by the sample deviation unless `normalize_std` is off: float32 [G].

        Exactly 0 where all rewards are equal, or for a single member.
        """
        return group_relative_advantages(rewards, normalize_std=self.config.normalize_std)
