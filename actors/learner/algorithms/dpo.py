"""DPO: a preference between two answers, without a reward model (arXiv 2305.18290, equation 7).

    loss of a pair = -log sigmoid( h(chosen) - h(rejected) ),   h = beta * sum of (log p - log p of the reference)

A group is a pair. Its rewards only say which answer is better: the best of a group has credit 1, the worst -1, and a
group of equal rewards has none and is left out. Both members have to stand in one micro-batch, because the loss is of
the pair; it is a mean over the step's pairs.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.actors.learner.advantages.group_relative import is_zero_variance
from headrace.actors.learner.algorithms.rollout_method import Credit, check_group, require_columns, spread_credit
from headrace.actors.learner.algorithms.settings import refuse_unread
from headrace.engine.config import AlgorithmConfig
from headrace.engine.errors import ConfigError
from headrace.engine.interfaces import GroupRewards, LossInputs, LossOutput
from headrace.engine.types import AlgorithmTraits, MicroBatch


class Dpo:
    """Learns from pairs. Implements `headrace.engine.interfaces.Algorithm`."""

    name = "dpo"
    reads = frozenset({"beta", "normalize_std"})

    def __init__(self, config: AlgorithmConfig) -> None:
        """Check the settings; nothing is loaded.

        Raises:
            ConfigError: A setting has no effect with this method, or beta is not above 0.
        """
        refuse_unread(config, self.name, self.reads)
        if not config.beta > 0:
            raise ConfigError(f"algorithm.beta = {config.beta:g} does not weigh anything: set it above 0; 0.1 is usual")
        self.config = config

    @property
    def traits(self) -> AlgorithmTraits:
        """Whole pairs, with the reference's log-probabilities; pairs without a preference take no forward pass."""
        return AlgorithmTraits(
            trains_on="preference_pairs",
            min_group_size=2,
            skips_zero_credit=True,
            whole_groups=True,
            columns=("reference_logprobs",),
        )

    def shape_rewards(self, group: GroupRewards) -> npt.NDArray[np.float64]:
        """The raw rewards, float64 [G]: their order is all that counts.

        Raises:
            InputError: A reward is not finite, or the group is empty; names the group.
        """
        return check_group(group)

    def keeps(self, group: GroupRewards) -> bool:
        """Every group: the pairs of a table are what they are."""
        return True

    def assign_credit(self, groups: Sequence[GroupRewards]) -> list[Credit]:
        """1 for the best of each group, -1 for the worst, 0 for the rest: float32 [G] each, in order.

        Of several that are equally good or bad the first counts; all 0 where all rewards are equal.

        Raises:
            InputError: A reward is not finite, or a group is empty; names the group.
        """
        return [_best_and_worst(check_group(group)) for group in groups]

    def token_advantages(self, micro_batch: MicroBatch) -> Credit:
        """The sign of each answer on its loss tokens, float32 [N]; 0 on all other tokens.

        Raises:
            InputError: The micro-batch has no reference log-probabilities.
        """
        require_columns(micro_batch, self.traits.columns, self.name)
        return spread_credit(micro_batch)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """The loss of one micro-batch's pairs, divided by the step's pairs."""
        from headrace.actors.learner.losses.preference import preference_loss

        return preference_loss(inputs, beta=self.config.beta)


def _best_and_worst(rewards: npt.NDArray[np.float64]) -> Credit:
    credit = np.zeros(rewards.shape, np.float32)
    if not is_zero_variance(rewards):
        credit[np.argmax(rewards)], credit[np.argmin(rewards)] = 1.0, -1.0
    return credit
