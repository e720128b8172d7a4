# pyright: basic
# torch is only partly typed.
"""Clipped policy loss with three policies: behaviour (sampled), proximal (anchor of the clip) and current.

Per token, with A the advantage, r = exp(current - proximal) and w the detached importance weight proximal / behaviour:

    w * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))  +  kl_coef * KL  -  entropy_coef * entropy

PPO: arXiv 1707.06347, equation 7; decoupled: arXiv 2110.00641, section 3; separate bounds: DAPO, arXiv 2503.14476,
equation 10; dual clip: arXiv 1912.09729, equation 8.

With one update a batch the proximal policy is the detached current one: r is exactly 1, the clip cannot bite, and w is
what corrects for stale or mismatched samples.

Invariants:
- Masked tokens are replaced before any exponential, so whatever stands there can make neither value nor gradient
  non-finite. The result is connected to the graph even when no token takes part.
- A rejected token leaves the policy, the KL and the entropy term, and the denominator.
- The terms are added token by token and reduced once, so that one normalisation holds for all of them.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from headrace.actors.learner.losses.contribution import LossContribution
from headrace.actors.learner.losses.kl import Estimator, kl_loss, kl_value
from headrace.actors.learner.losses.masking import check_columns, require_column, where_loss
from headrace.actors.learner.losses.normalization import Normalization, Unit, normalize_tokens
from headrace.actors.learner.losses.ratios import ImportanceWeights, bounded_exp, importance_weights
from headrace.engine.config.algorithm import AlgorithmConfig, ImportanceConfig
from headrace.engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.engine.interfaces import LossInputs
else:
    Tensor = LossInputs = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossOptions:
    """Constants of a policy loss.

    Attributes:
        clip_low, clip_high: The ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: Most that a token with a negative advantage may cost, as a multiple of -A; above 1, or None for off.
        importance: Correction between sampler and learner.
        normalization: What the loss is a mean over.
        kl_estimator: Of the KL term in the loss, weighed by `LossInputs.kl_coef`; None where the KL is in the reward.
        entropy_coef: Factor of the entropy bonus.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)
    normalization: Normalization = field(default_factory=Normalization)
    kl_estimator: Estimator | None = "k3"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if not (self.clip_low >= 0 and self.clip_high >= 0):
            raise ConfigError(f"clip_low is {self.clip_low} and clip_high {self.clip_high}: neither may be below 0")
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ConfigError(f"dual_clip is {self.dual_clip}: it must be above 1, or off; 3 is usual")
        if self.kl_estimator == "k1":
            raise ConfigError(
                'kl.estimator is "k1" with kl.place = "loss": its gradient averages to 0; use k2, k3 or unbiased, or '
                'set kl.place to "reward"'
            )

    @classmethod
    def from_config(cls, config: AlgorithmConfig, *, unit: Unit) -> "PolicyLossOptions":
        """The options that a configuration asks for; `unit` is the method's own normalisation, taken for "auto".

        Raises:
            ConfigError: A value is out of range, or a constant length is asked for and not given.
        """
        estimator: Estimator = "k3" if config.kl.estimator == "auto" else config.kl.estimator
        return cls(
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip or None,
            importance=config.importance,
            normalization=Normalization(
                unit=unit if config.normalization == "auto" else config.normalization,
                length=config.length_constant,
                fixed=config.importance.fixed_denominator,
            ),
            kl_estimator=estimator if config.kl.place == "loss" else None,
            entropy_coef=config.entropy_coef,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """The columns of a policy loss with 0 on masked tokens, and the weights.

    Attributes:
        current: float [N], nats, with gradient.
        log_ratio: float [N], current minus proximal, with gradient.
        advantages: float [N].
        importance: Weights and rejections, detached.
    """

    current: Tensor
    log_ratio: Tensor
    advantages: Tensor
    importance: ImportanceWeights


def policy_loss(inputs: LossInputs, options: PolicyLossOptions) -> LossContribution:
    """The clipped policy loss of one micro-batch, already divided by the step's count.

    Args:
        inputs: Tensors over N tokens; values where `loss_mask` is False are ignored, also when not finite.
        options: The constants.

    Returns:
        The loss and the figures of `contribute`.

    Raises:
        InputError: A column is missing or has another shape than the mask.
        ConfigError: A constant of the importance weights is out of range.
    """
    tokens = policy_tokens(inputs, options)
    surrogate, clipped = clipped_surrogate(tokens.log_ratio, tokens.advantages, options)
    return contribute(inputs, tokens, surrogate, clipped, options)


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, options: PolicyLossOptions) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of each token, without any weight.

    Args:
        log_ratio: float [N], current minus proximal, in nats; its exponent is bounded here.
        advantages: float [N].
        options: The clip range and the dual clip.

    Returns:
        Loss float [N], and bool [N]: where the clip or the dual clip took the gradient away.
    """
    ratio = bounded_exp(log_ratio)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if options.dual_clip is not None:
        ceiling = -advantages * options.dual_clip
        too_high = (advantages < 0) & (loss > ceiling)  # positive advantages are already bounded by the clip
        loss = torch.where(too_high, ceiling, loss)
        clipped = clipped | too_high
    return loss, clipped


def policy_tokens(inputs: LossInputs, options: PolicyLossOptions, *, advantages: Tensor | None = None) -> PolicyTokens:
    """Check and mask the columns, and weigh the tokens; the first half of every policy loss.

    Args:
        inputs: One micro-batch.
        options: The constants.
        advantages: float [N], instead of those of the inputs.

    Raises:
        InputError: A column has another shape than the mask.
        ConfigError: A constant of the importance weights is out of range.
    """
    mask = inputs.loss_mask
    given = inputs.advantages if advantages is None else advantages
    check_columns(
        mask,
        logprobs=inputs.logprobs,
        proximal_logprobs=inputs.proximal_logprobs,
        behaviour_logprobs=inputs.behaviour_logprobs,
        reference_logprobs=inputs.reference_logprobs,
        entropy=inputs.entropy,
        advantages=given,
        sequence_ids=inputs.sequence_ids,
    )
    current = where_loss(mask, inputs.logprobs)
    proximal = where_loss(mask, inputs.proximal_logprobs.detach())
    return PolicyTokens(
        current=current,
        log_ratio=current - proximal,
        advantages=where_loss(mask, given.detach()),
        importance=importance_weights(
            proximal, inputs.behaviour_logprobs, mask, inputs.sequence_ids, options.importance
        ),
    )


def contribute(
    inputs: LossInputs, tokens: PolicyTokens, surrogate: Tensor, clipped: Tensor, options: PolicyLossOptions
) -> LossContribution:
    """Weigh a surrogate, add the KL and entropy terms and normalise; the second half of every policy loss.

    Args:
        inputs: One micro-batch.
        tokens: What `policy_tokens` made of it.
        surrogate: float [N], loss of each token before its weight, with gradient.
        clipped: bool [N], where a clip acted.
        options: The constants.

    Returns:
        The loss and, in `sums`: pg_loss and clipfrac over the tokens that were kept; ppo_kl, mismatch_kl, mismatch_abs,
        importance_weight (0 when rejected), importance_weight_sq, importance_raw, rejected, and kl where there is a
        reference, entropy where it is asked for, over all loss tokens. In `maxima`: importance_raw.

    Raises:
        InputError: A KL or entropy term is asked for and its column is missing.
    """
    mask, importance = inputs.loss_mask, tokens.importance
    weighted = importance.weight * surrogate
    used = where_loss(importance.kept, importance.weight)
    raw = where_loss(mask, importance.raw)
    sums = {
        "pg_loss": where_loss(importance.kept, weighted).sum(),
        "clipfrac": (clipped & importance.kept).sum(),
        "ppo_kl": -tokens.log_ratio.sum(),
        "mismatch_kl": -importance.gap.sum(),
        "mismatch_abs": importance.gap.abs().sum(),
        "importance_weight": used.sum(),
        "importance_weight_sq": (used**2).sum(),
        "importance_raw": raw.sum(),
        "rejected": (mask & ~importance.kept).sum(),
    }
    regularizer = _kl_term(inputs, tokens, options, sums) + _entropy_term(inputs, options, sums)
    reduced = normalize_tokens(
        weighted + regularizer,
        mask,
        inputs.sequence_ids,
        normalization=options.normalization,
        num_loss_tokens=inputs.num_loss_tokens,
        num_sequences=inputs.num_sequences,
        kept=importance.kept,
    )
    highest = torch.cat([raw, raw.new_zeros(1)]).max()  # of an empty micro-batch too
    return LossContribution.of(reduced, sums, {"importance_raw": highest})


def _kl_term(
    inputs: LossInputs, tokens: PolicyTokens, options: PolicyLossOptions, sums: dict[str, Tensor]
) -> Tensor | float:
    asked_for = options.kl_estimator is not None and inputs.kl_coef != 0
    if inputs.reference_logprobs is None and not asked_for:
        return 0.0
    column = require_column(
        inputs.reference_logprobs,
        inputs.loss_mask,
        name="reference_logprobs",
        reason="a KL term needs them; set algorithm.kl_coef to 0 without a reference",
    )
    reference = where_loss(inputs.loss_mask, column.detach())
    sums["kl"] = kl_value(tokens.current, reference, estimator=options.kl_estimator or "k3").sum()
    if options.kl_estimator is None or not asked_for:
        return 0.0
    # From the sampler to the current policy; truncated as a whole, as the weight itself is.
    weight = tokens.importance.weight * bounded_exp(tokens.log_ratio.detach())
    if options.importance.kind != "none":
        weight = weight.clamp(max=options.importance.cap)
    return inputs.kl_coef * kl_loss(tokens.current, reference, estimator=options.kl_estimator, weight=weight)


def _entropy_term(inputs: LossInputs, options: PolicyLossOptions, sums: dict[str, Tensor]) -> Tensor | float:
    if not options.entropy_coef:
        return 0.0
    column = require_column(
        inputs.entropy,
        inputs.loss_mask,
        name="entropy",
        reason="an entropy term needs it; set algorithm.entropy_coef to 0 without it",
    )
    entropy = where_loss(inputs.loss_mask, column)
    sums["entropy"] = entropy.sum()
    return -options.entropy_coef * entropy
