"""Supervised fine-tuning: the negative log-likelihood of demonstrations, as a warm-up before RL.

    loss of a token = -log p(token)        a mean over the step's tokens

Nothing is sampled, so there is neither credit (it is 1) nor a correction for a sampler.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.actors.learner.algorithms.rollout_method import Credit, check_group, spread_credit
from headrace.actors.learner.algorithms.settings import refuse_constant_without_length, refuse_unread
from headrace.engine.config import AlgorithmConfig
from headrace.engine.interfaces import GroupRewards, LossInputs, LossOutput
from headrace.engine.types import AlgorithmTraits, MicroBatch


class Sft:
    """Imitates what it is shown. Implements `headrace.engine.interfaces.Algorithm`."""

    name = "sft"
    reads = frozenset({"normalization", "normalize_std"})

    def __init__(self, config: AlgorithmConfig) -> None:
        """Check the settings; nothing is loaded.

        Raises:
            ConfigError: A setting has no effect with this method.
        """
        refuse_unread(config, self.name, self.reads)
        refuse_constant_without_length(config, "token")
        self.config = config

    @property
    def traits(self) -> AlgorithmTraits:
        """Demonstrations, and nothing besides."""
        return AlgorithmTraits(trains_on="demonstrations")

    def shape_rewards(self, group: GroupRewards) -> npt.NDArray[np.float64]:
        """The raw rewards, float64 [G]; nothing reads them.

        Raises:
            InputError: A reward is not finite, or the group is empty; names the group.
        """
        return check_group(group)

    def keeps(self, group: GroupRewards) -> bool:
        """Every group."""
        return True

    def assign_credit(self, groups: Sequence[GroupRewards]) -> list[Credit]:
        """1 for each sample, float32 [G] each, in order.

        Raises:
            InputError: A reward is not finite, or a group is empty; names the group.
        """
        return [np.ones(check_group(group).shape, np.float32) for group in groups]

    def token_advantages(self, micro_batch: MicroBatch) -> Credit:
        """1 on each loss token, float32 [N]; the loss does not read it."""
        return spread_credit(micro_batch)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """The negative log-likelihood of one micro-batch, divided by the step's counts."""
        from headrace.actors.learner.losses.normalization import Normalization
        from headrace.actors.learner.losses.supervised import supervised_loss

        unit = "token" if self.config.normalization == "auto" else self.config.normalization
        return supervised_loss(inputs, Normalization(unit=unit, length=self.config.length_constant))
