"""RLOO: REINFORCE with the others of the prompt as the baseline (arXiv 2402.14740; Kool et al. 2019).

    A_i = r_i - mean(r_j, j != i)

The baseline does not depend on response i, so the gradient is unbiased. The paper's loss is plain REINFORCE,
-A_i * sum of the response's log-probabilities; the clipped loss has that gradient exactly with one update a batch (a
ratio of 1 cannot clip), as a mean over the step's tokens: the same direction, another length.
"""

import numpy as np
import numpy.typing as npt

from headrace.actors.learner.advantages.rloo import rloo_advantages
from headrace.actors.learner.algorithms.rollout_method import Credit, RolloutMethod


class Rloo(RolloutMethod):
    """Leave-one-out credit and the policy loss. `normalize_std` is not read: it never divides."""

    name = "rloo"

    def credit(self, rewards: npt.NDArray[np.float64]) -> Credit:
        """Each reward minus the mean of the others, float32 [G]; exactly 0 for a single member."""
        return rloo_advantages(rewards)
