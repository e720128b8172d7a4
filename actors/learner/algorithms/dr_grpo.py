"""Dr. GRPO: GRPO without its two biases (arXiv 2503.20783, section 3.2).

    A_i = r_i - mean(r)        loss = sum over tokens / (length_constant * responses)

Without the division by the deviation, nearly solved and nearly unsolved prompts do not count more than others. With a
constant length instead of each response's own, a token counts the same in a long and in a short response; the constant
(`length_constant`, by default the longest response allowed) is the same for the whole run, whatever is in a batch.
"""

import numpy as np
import numpy.typing as npt

from headrace.actors.learner.advantages.group_relative import group_relative_advantages
from headrace.actors.learner.algorithms.rollout_method import Credit, RolloutMethod


class DrGrpo(RolloutMethod):
    """Centred credit, never divided (`normalize_std` is not read); the clipped policy loss over a constant length."""

    name = "dr_grpo"
    unit = "constant"

    def credit(self, rewards: npt.NDArray[np.float64]) -> Credit:
        """The centred rewards, float32 [G]; exactly 0 where all are equal, or for a single member."""
        return group_relative_advantages(rewards, normalize_std=False)
