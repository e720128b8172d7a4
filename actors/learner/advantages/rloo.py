"""Leave-one-out credit: each sample against the mean of the others of its prompt (numpy only).

RLOO, "Back to Basics" (arXiv 2402.14740), the estimator of its section on RLOO; first in Kool et al., "Buy 4 REINFORCE
Samples, Get a Baseline for Free!" (2019):

    A_i = r_i - sum(r_j for j != i) / (G - 1)  =  G / (G - 1) * (r_i - mean(r))

The others' mean does not depend on sample i, so as a baseline it leaves the gradient unbiased. There is no division by
a deviation.
"""

import numpy as np
import numpy.typing as npt

from headrace.actors.learner.advantages.domain import as_credit, finite_rewards
from headrace.actors.learner.advantages.group_relative import is_zero_variance


def rloo_advantages(rewards: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Credit of the members of one group.

    Args:
        rewards: [G], in any order.

    Returns:
        float32 [G], which sums to 0 up to rounding; exactly 0 for a group of zero variance or of a single member, which
        has no others to compare with.

    Raises:
        InputError: The group is empty, not one-dimensional, or a reward is not finite or too large for its credit.
    """
    values = finite_rewards(rewards)
    if is_zero_variance(values):
        return np.zeros(values.size, dtype=np.float32)
    # Scaled first, so that the sum of huge rewards does not overflow before their difference is known.
    scale = float(np.max(np.abs(values)))
    scaled = values / scale
    with np.errstate(over="ignore"):  # as_credit tells
        return as_credit((scaled - scaled.mean()) * (values.size / (values.size - 1)) * scale)
