"""PPO with a critic: credit of each token (arXiv 1707.06347, equation 7; advantages: arXiv 1506.02438, equation 16).

The scorer's reward comes with the last token of a response, the critic says what each state was worth, and generalised
advantage estimation (`gae.gamma`, `gae.lam`) turns both into a credit for each token, on the ranks. So a response needs
no others to be compared with, and rewards that are all alike still teach where the critic expected something else.

With `kl.place = "reward"` each token also earns -kl_coef * (log p of the sampler - log p of the reference), as in
arXiv 1909.08593, equation 2; then the loss has no KL term.

The critic is trained beside the policy, on the same samples: `critic_loss` is its part of a step.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.actors.learner.advantages.domain import as_credit
from headrace.actors.learner.advantages.gae import Gae, gae, outcome_rewards
from headrace.actors.learner.advantages.kl_reward import kl_shaped_rewards
from headrace.actors.learner.algorithms.rollout_method import (
    CLIP_KEYS,
    ROLLOUT_KEYS,
    Credit,
    RolloutMethod,
    check_group,
    require_columns,
)
from headrace.engine.interfaces import GroupRewards, LossOutput
from headrace.engine.types import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


class Ppo(RolloutMethod):
    """Advantages from a critic, compared with nothing in a group, and the clipped policy loss."""

    name = "ppo"
    reads = ROLLOUT_KEYS | CLIP_KEYS | {"gae"}
    min_group_size = 1
    credit_by_token = True
    kl_in_reward = True
    columns = ("values",)

    def assign_credit(self, groups: Sequence[GroupRewards]) -> list[Credit]:
        """The shaped rewards themselves, float32 [G] each, in order: what `token_advantages` starts from.

        Raises:
            InputError: A reward is not finite, or a group is empty; names the group.
        """
        return [as_credit(check_group(group)) for group in groups]

    def token_advantages(self, micro_batch: MicroBatch) -> Credit:
        """Generalised advantages of the loss tokens, float32 [N]; 0 on all other tokens.

        Raises:
            InputError: The micro-batch has no values, or no reference log-probabilities with a KL term.
        """
        return as_credit(self.estimate(micro_batch).advantages)

    def estimate(self, micro_batch: MicroBatch) -> Gae:
        """Advantages and returns, float64 [N] each; `micro_batch.advantages` carries each sample's reward.

        Raises:
            InputError: As in `token_advantages`.
        """
        require_columns(micro_batch, self.traits.columns, self.name)
        config, mask, sequences = self.config, micro_batch.loss_mask, micro_batch.sequence_ids
        if config.kl_coef and config.kl.place == "reward":
            assert micro_batch.reference_logprobs is not None
            rewards = kl_shaped_rewards(
                outcomes=micro_batch.advantages,
                logprobs=micro_batch.behaviour_logprobs,
                reference_logprobs=micro_batch.reference_logprobs,
                loss_mask=mask,
                sequence_ids=sequences,
                kl_coef=config.kl_coef,
                estimator=config.kl.estimator,
            )
        else:
            rewards = outcome_rewards(micro_batch.advantages, mask, sequences)
        assert micro_batch.values is not None
        return gae(
            rewards=rewards,
            values=micro_batch.values,
            loss_mask=mask,
            sequence_ids=sequences,
            gamma=config.gae.gamma,
            lam=config.gae.lam,
        )

    def critic_loss(
        self, values: Tensor, micro_batch: MicroBatch, *, num_loss_tokens: int, num_sequences: int
    ) -> LossOutput:
        """The critic's part of a step: the clipped squared error against the returns, a mean over the step's tokens.

        Args:
            values: float [N], of the critic that is trained, with gradient.
            micro_batch: With the stored `values` of when the batch was sampled, from which the returns are made.
            num_loss_tokens: Of the whole step.
            num_sequences: Sequences with a loss token in the whole step.

        Raises:
            InputError: As in `token_advantages`, or the shapes differ.
        """
        import torch

        from headrace.actors.learner.losses.value import value_loss

        def column(numbers: "np.ndarray[Any, Any]") -> Tensor:
            return torch.as_tensor(numbers).to(values)

        returns = self.estimate(micro_batch).returns
        assert micro_batch.values is not None
        return value_loss(
            values,
            column(micro_batch.values),
            column(returns),
            torch.as_tensor(micro_batch.loss_mask != 0, device=values.device),
            torch.as_tensor(micro_batch.sequence_ids.astype(np.int64), device=values.device),
            clip_range=self.config.gae.value_clip,
            num_loss_tokens=num_loss_tokens,
            num_sequences=num_sequences,
        )
