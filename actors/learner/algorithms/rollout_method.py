"""What the methods share that learn from sampled responses and a reward each.

Credit needs numpy alone, so the hub can run it; torch is imported when a loss is asked for.

A response goes through, in this order: raw reward -> `keeps` (whole groups, raw rewards) -> `shape_rewards` ->
`assign_credit` (whole groups or the whole step, on the hub) -> `token_advantages` and `loss` (micro-batches, on the
ranks). A method says what is its own: its credit, its loss, and the defaults of its paper.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.actors.learner.advantages.domain import finite_rewards
from headrace.actors.learner.advantages.dynamic_sampling import keeps_group
from headrace.actors.learner.advantages.shaping import check_shaping, shape_rewards
from headrace.actors.learner.algorithms.settings import (
    refuse_constant_without_length,
    refuse_empty_rejection,
    refuse_unread,
    refuse_useless_clip,
    refuse_useless_kl,
    rejection_moves_mean,
)
from headrace.engine.config import AlgorithmConfig
from headrace.engine.errors import InputError
from headrace.engine.interfaces import GroupRewards, LossInputs, LossOutput
from headrace.engine.types import AlgorithmTraits, MicroBatch
from headrace.engine.types.learning import ColumnName

if TYPE_CHECKING:
    from headrace.actors.learner.losses.policy import PolicyLossOptions

Credit = npt.NDArray[np.float32]
Unit = Literal["token", "sequence", "constant"]
Result = TypeVar("Result")

# Settings that every method here reads.
ROLLOUT_KEYS = frozenset(
    {"normalization", "dynamic_sampling", "shaping", "importance", "kl_coef", "kl", "entropy_coef", "normalize_std"}
)
CLIP_KEYS = frozenset({"clip_low", "clip_high", "dual_clip"})


class RolloutMethod:
    """Base of the methods. Implements `headrace.engine.interfaces.Algorithm` but for `credit`.

    Attributes:
        name: The entry point.
        reads: Dotted keys below `algorithm`; all others have to stay at their defaults.
        unit: What the loss is a mean over where `normalization` is "auto".
        replaces_groups: Whether groups of equal raw rewards are replaced where `dynamic_sampling` is "auto".
        min_group_size: Samples of one prompt without which nothing is learnt.
        credit_scope: See `AlgorithmTraits`.
        credit_by_token: Whether a response's tokens may have different credit, so that a sample's 0 says nothing.
        kl_in_reward: Whether a token's KL can be part of its reward.
        columns: What a micro-batch must carry besides the sampler's columns and those of the KL term.
    """

    name: ClassVar[str]
    reads: ClassVar[frozenset[str]] = ROLLOUT_KEYS | CLIP_KEYS
    unit: ClassVar[Unit] = "token"
    replaces_groups: ClassVar[bool] = False
    min_group_size: ClassVar[int] = 2
    credit_scope: ClassVar[Literal["group", "batch"]] = "group"
    credit_by_token: ClassVar[bool] = False
    kl_in_reward: ClassVar[bool] = False
    columns: ClassVar[tuple[ColumnName, ...]] = ()

    def __init__(self, config: AlgorithmConfig) -> None:
        """Check the settings; nothing is loaded.

        Raises:
            ConfigError: A setting cannot be honoured by this method; names it and the remedy.
        """
        refuse_unread(config, self.name, self.reads)
        refuse_useless_kl(config, self.name, in_reward=self.kl_in_reward)
        refuse_useless_clip(config)
        refuse_empty_rejection(config)
        refuse_constant_without_length(config, self.unit)
        check_shaping(config.shaping)
        self.config = self.resolve(config)

    def resolve(self, config: AlgorithmConfig) -> AlgorithmConfig:
        """The settings with this method's own where they say "auto"."""
        estimator = config.kl.estimator
        if estimator == "auto":
            estimator = "k1" if config.kl.place == "reward" else "k3"
        return msgspec.structs.replace(config, kl=msgspec.structs.replace(config.kl, estimator=estimator))

    @property
    def traits(self) -> AlgorithmTraits:
        """A sample without credit has no gradient unless a KL or entropy term gives it one, or credit is by token.

        It needs a forward pass all the same where rules reject: what they reject of it leaves the mean.
        """
        config, filters = self.config, self._filters()
        regularized = bool(config.kl_coef or config.entropy_coef)
        needed = regularized or self.credit_by_token or rejection_moves_mean(config.importance)
        columns: tuple[ColumnName, ...] = self.columns
        if config.kl_coef:
            columns = ("reference_logprobs", *columns)
        return AlgorithmTraits(
            credit_scope=self.credit_scope,
            min_group_size=max(self.min_group_size, 2 if filters else 1),
            filters_groups=filters,
            skips_zero_credit=config.skip_zero_variance and not needed,
            columns=columns,
            needs_entropy=bool(config.entropy_coef),
        )

    def shape_rewards(self, group: GroupRewards) -> npt.NDArray[np.float64]:
        """The rewards that credit is assigned from, float64 [G]: clip, scale and length terms of `algorithm.shaping`.

        Raises:
            InputError: A reward is not finite, or the group is empty; names the group.
        """
        return of_group(group, partial(shape_rewards, group.rewards, group.lengths, self.config.shaping))

    def keeps(self, group: GroupRewards) -> bool:
        """Whether a group is trained on: with dynamic sampling, whether its raw rewards differ; else always."""
        return not self._filters() or of_group(group, partial(keeps_group, group.rewards))

    def assign_credit(self, groups: Sequence[GroupRewards]) -> list[Credit]:
        """Credit of each whole group from its shaped rewards: float32 [G] each, in order.

        Raises:
            InputError: A reward is not finite, or a group is empty; names the group.
        """
        return [of_group(group, partial(self.credit, group.rewards)) for group in groups]

    def credit(self, rewards: npt.NDArray[np.float64]) -> Credit:
        """The credit of one group, float32 [G], from its shaped rewards, float64 [G]."""
        raise NotImplementedError

    def token_advantages(self, micro_batch: MicroBatch) -> Credit:
        """The scalar credit on each loss token, float32 [N]; 0 on all other tokens.

        Raises:
            InputError: The micro-batch lacks a column of `traits.columns`.
        """
        require_columns(micro_batch, self.traits.columns, self.name)
        return spread_credit(micro_batch)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """The clipped policy loss of one micro-batch, divided by the step's counts."""
        from headrace.actors.learner.losses.policy import policy_loss

        return policy_loss(inputs, self.loss_options())

    def loss_options(self) -> "PolicyLossOptions":
        """The constants of the policy loss."""
        from headrace.actors.learner.losses.policy import PolicyLossOptions

        return PolicyLossOptions.from_config(self.config, unit=self.unit)

    def _filters(self) -> bool:
        setting = self.config.dynamic_sampling
        return self.replaces_groups if setting == "auto" else setting == "on"


def of_group(group: GroupRewards, work: Callable[[], Result]) -> Result:
    """Do something with one group, so that an error says which.

    Raises:
        InputError: `work` did, with the group's name in front.
    """
    try:
        return work()
    except InputError as error:
        raise InputError(f"group {group.group_id!r}: {error}") from error


def check_group(group: GroupRewards) -> npt.NDArray[np.float64]:
    """The rewards of a group, float64 [G].

    Raises:
        InputError: A reward is not finite, or the group is empty; names the group.
    """
    return of_group(group, partial(finite_rewards, group.rewards))


def spread_credit(micro_batch: MicroBatch) -> Credit:
    """The scalar credit on each loss token, float32 [N]; 0 on all other tokens, whatever stands there."""
    return np.where(micro_batch.loss_mask != 0, micro_batch.advantages, np.float32(0.0))


def require_columns(micro_batch: MicroBatch, columns: Collection[ColumnName], method: str) -> None:
    """Refuse a micro-batch that lacks what the method reads.

    Raises:
        InputError: Names the column and the method.
    """
    for name in columns:
        if getattr(micro_batch, name) is None:
            raise InputError(f"the micro-batch has no {name}, which {method} reads: fill in the column first")
