"""REINFORCE++: credit normalised over the whole step instead of within a group (arXiv 2501.03262, section 3).

    reinforce_plus_plus             A_i = (r_i - mean(r)) / std(r)            mean and deviation over the step
    reinforce_plus_plus_baseline    A_i = c_i / std(c),   c_i = r_i - mean of its group

The first takes one response a prompt or several; the second needs several. Statistics are of the population, over
samples, each with weight 1. Both use the clipped policy loss as a mean over the step's tokens; the KL is in the loss
(the paper's first form has it in the reward of each token, which credit by sample cannot carry).
"""

from collections.abc import Sequence

from headrace.actors.learner.advantages.reinforce import batch_normalized_advantages
from headrace.actors.learner.algorithms.rollout_method import (
    CLIP_KEYS,
    ROLLOUT_KEYS,
    Credit,
    RolloutMethod,
    check_group,
)
from headrace.engine.interfaces import GroupRewards


class ReinforcePlusPlus(RolloutMethod):
    """Credit normalised over the step, and the clipped policy loss. It always divides by the deviation."""

    name = "reinforce_plus_plus"
    reads = (ROLLOUT_KEYS - {"normalize_std"}) | CLIP_KEYS
    min_group_size = 1
    credit_scope = "batch"
    group_baseline = False

    def assign_credit(self, groups: Sequence[GroupRewards]) -> list[Credit]:
        """Credit of all groups of one step from their shaped rewards: float32 [G] each, in order.

        Exactly 0 for all of them if all rewards of the step are equal.

        Raises:
            InputError: A reward is not finite, or a group is empty; names the group.
        """
        for group in groups:
            check_group(group)
        return batch_normalized_advantages([group.rewards for group in groups], group_baseline=self.group_baseline)


class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    """The form that centres each group first, so that a hard prompt does not count as a bad answer."""

    name = "reinforce_plus_plus_baseline"
    min_group_size = 2
    group_baseline = True
