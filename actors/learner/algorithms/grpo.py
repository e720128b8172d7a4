"""GRPO with decoupled clipping and truncated importance sampling (DeepSeekMath, arXiv 2402.03300).

Credit needs numpy alone, so the hub can run it; torch is imported when a loss is asked for.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headrace.actors.learner.advantages.group_relative import group_relative_advantages
from headrace.engine.config import AlgorithmConfig
from headrace.engine.errors import InputError
from headrace.engine.interfaces import GroupRewards, LossInputs, LossOutput
from headrace.engine.types import AlgorithmTraits, MicroBatch

if TYPE_CHECKING:
    from headrace.actors.learner.losses.policy import PolicyLossOptions


class Grpo:
    """Group-relative credit spread over the tokens, and the clipped policy loss as a global token mean.

    Implements `headrace.engine.interfaces.Algorithm`.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    @property
    def traits(self) -> AlgorithmTraits:
        """Credit within a group; equal rewards teach nothing."""
        return AlgorithmTraits(min_group_size=2, skips_zero_credit=True, needs_entropy=bool(self.config.entropy_coef))

    def shape_rewards(self, group: GroupRewards) -> npt.NDArray[np.float64]:
        """The raw rewards."""
        return group.rewards

    def keeps(self, group: GroupRewards) -> bool:
        """Every group."""
        return True

    def assign_credit(self, groups: Sequence[GroupRewards]) -> list[npt.NDArray[np.float32]]:
        """Credit of each whole group: float32 [G] each, in order; 0 for groups whose rewards are all equal.

        Raises:
            InputError: A reward is not finite, or a group is empty; names the group.
        """
        credit: list[npt.NDArray[np.float32]] = []
        for group in groups:
            try:
                credit.append(group_relative_advantages(group.rewards, normalize_std=self.config.normalize_std))
            except InputError as error:
                raise InputError(f"group {group.group_id!r}: {error}") from error
        return credit

    def token_advantages(self, micro_batch: MicroBatch) -> npt.NDArray[np.float32]:
        """The scalar credit on each loss token, float32 [N]; 0 on all other tokens."""
        return np.where(micro_batch.loss_mask != 0, micro_batch.advantages, np.float32(0.0))

    def loss(self, inputs: LossInputs) -> LossOutput:
        """The policy loss of one micro-batch, divided by the step's loss tokens."""
        from headrace.actors.learner.losses.policy import policy_loss

        return policy_loss(inputs, self._options())

    def _options(self) -> "PolicyLossOptions":
        from headrace.actors.learner.losses.policy import PolicyLossOptions

        return PolicyLossOptions.from_config(self.config, unit="token")
