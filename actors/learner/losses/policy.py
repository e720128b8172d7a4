# pyright: basic
# torch is only partly typed.
"""Clipped policy loss with three policies: behaviour (sampled), proximal (anchor of the clip) and current.

Per token, with A the advantage, r = exp(current - proximal) and w = min(exp(proximal - behaviour), cap) detached:

    w * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))  +  kl_coef * k3  -  entropy_coef * entropy

PPO: arXiv 1707.06347, equation 7; decoupled: arXiv 2110.00641; separate bounds: DAPO, arXiv 2503.14476, equation 10;
dual clip: arXiv 1912.09729, equation 8; k3: http://joschu.net/blog/kl-approx.html.

With one update a batch the proximal policy is the detached current one: r is exactly 1, the clip cannot bite, and w is
what corrects for stale or mismatched samples.

Invariants:
- Masked tokens are replaced before any exponential, so whatever stands there can make neither value nor gradient
  non-finite. The result is connected to the graph even when no token takes part.
- Exponents are bounded where the ratio is formed: on the mean for a sequence, not on each of its tokens.
- A micro-batch contributes sum / (loss tokens of the whole step): the cut into micro-batches changes nothing.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from headrace.engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.engine.interfaces import LossInputs
else:
    Tensor = LossInputs = Any

# exp(20) = 4.9e8: far beyond any useful ratio, far from the end of float32.
MAX_LOG_RATIO = 20.0
# Above this gap the KL term saturates: its value stays, its gradient is 0.
MAX_KL_GAP = 10.0

Level = Literal["token", "sequence"]
Kind = Literal["tis", "mask", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossOptions:
    """Constants of the loss.

    Attributes:
        clip_low, clip_high: The ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: Most that a token with a negative advantage may cost, as a multiple of -A; above 1, or None for off.
        importance_level: One weight a token, or the geometric mean over a sequence's loss tokens.
        importance_kind: "tis" truncates weights at the cap, "mask" drops tokens above it, "none" is weight 1.
        importance_cap: The largest weight.
        kl_coef: Factor of the k3 estimate of KL(current || reference).
        entropy_coef: Factor of the entropy bonus.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    importance_level: Level = "token"
    importance_kind: Kind = "tis"
    importance_cap: float = 2.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ConfigError(f"dual_clip is {self.dual_clip}: it must be above 1, or off; 3 is usual")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """What one micro-batch contributes.

    Attributes:
        loss: float32 [], to call `backward` on.
        sums: Detached float32 [] each, over this micro-batch's loss tokens.
        maxima: Detached float32 [] each, over the same tokens.
        denominator: What the loss was divided by.
        rejected: float32 [], rejected units of the denominator.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]
    denominator: float
    rejected: Tensor


def policy_loss(inputs: LossInputs, options: PolicyLossOptions) -> PolicyLoss:
    """The policy loss of one micro-batch, already divided by the step's loss tokens.

    Args:
        inputs: Tensors over N tokens; values where `loss_mask` is False are ignored, also when not finite.
        options: The constants.

    Returns:
        The loss and, in `sums`: pg_loss, clipfrac, ppo_kl, mismatch_kl, importance_weight, importance_raw; with a KL
        or entropy term also kl and entropy. In `maxima`: importance_raw.
    """
    mask = inputs.loss_mask
    current, proximal, behaviour = (
        _where_loss(mask, values)
        for values in (inputs.logprobs, inputs.proximal_logprobs.detach(), inputs.behaviour_logprobs)
    )
    advantages = _where_loss(mask, inputs.advantages)
    log_ratio = current - proximal
    surrogate, clipped = clipped_surrogate(log_ratio, advantages, options)
    mismatch = proximal - behaviour
    raw = importance_ratio(mismatch, mask, inputs.sequence_ids, level=options.importance_level)
    weight = truncate_weight(raw, kind=options.importance_kind, cap=options.importance_cap)
    pg_loss = _where_loss(mask, weight * surrogate).sum()

    total = pg_loss
    sums = {
        "pg_loss": pg_loss,
        "clipfrac": (clipped & mask).sum(),
        "ppo_kl": -log_ratio.sum(),
        "mismatch_kl": -mismatch.sum(),
        "importance_weight": _where_loss(mask, weight).sum(),
        "importance_raw": _where_loss(mask, raw).sum(),
    }
    if options.kl_coef and inputs.reference_logprobs is not None:
        kl = _where_loss(mask, k3_kl(current, _where_loss(mask, inputs.reference_logprobs.detach()))).sum()
        total = total + options.kl_coef * kl
        sums["kl"] = kl
    if options.entropy_coef and inputs.entropy is not None:
        entropy = _where_loss(mask, inputs.entropy).sum()
        total = total - options.entropy_coef * entropy
        sums["entropy"] = entropy
    highest = torch.cat([_where_loss(mask, raw), raw.new_zeros(1)]).max()  # of an empty micro-batch too
    return PolicyLoss(
        loss=total / max(1, inputs.num_loss_tokens),
        sums={name: value.detach().float() for name, value in sums.items()},
        maxima={"importance_raw": highest.detach()},
        denominator=float(max(1, inputs.num_loss_tokens)),
        rejected=highest.new_zeros(()),
    )


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, options: PolicyLossOptions) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of each token, without any weight.

    Args:
        log_ratio: float32 [N], current minus proximal, in nats; its exponent is bounded here.
        advantages: float32 [N].
        options: The clip range and the dual clip.

    Returns:
        Loss float32 [N], and bool [N]: where the clip or the dual clip took the gradient away.
    """
    ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
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


def importance_ratio(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, *, level: Level) -> Tensor:
    """exp(proximal - behaviour), detached and bounded but not yet truncated: float32 [N].

    At sequence level it is the geometric mean over the sequence's loss tokens, the same for all of them. The product
    over tokens is the textbook weight, but a harmless gap of 0.001 nat makes it 0.135 after 2000 tokens.
    """
    values = _where_loss(mask, log_ratio.detach())
    if level == "sequence":
        values = sequence_mean(values, mask, sequence_ids)
    return torch.exp(values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def truncate_weight(raw: Tensor, *, kind: Kind, cap: float) -> Tensor:
    """Truncated ("tis"), masked above the cap ("mask") or unit ("none") importance weights, [N].

    A masked token leaves the numerator only: the denominator is the step's count of loss tokens, known before any rank
    has seen a ratio.
    """
    if kind == "tis":
        return raw.clamp(max=cap)
    if kind == "mask":
        return torch.where(raw > cap, torch.zeros_like(raw), raw)
    return torch.ones_like(raw)


def sequence_mean(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Mean over the loss tokens of each sequence, given back to each of its tokens: [N]; differentiable."""
    if values.numel() == 0:
        return values
    num_sequences = int(sequence_ids.max()) + 1
    kept = _where_loss(mask, values)
    totals = values.new_zeros(num_sequences).index_add(0, sequence_ids, kept)
    counts = values.new_zeros(num_sequences).index_add(0, sequence_ids, mask.to(values.dtype))
    return (totals / counts.clamp(min=1.0))[sequence_ids]


def k3_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """k3 estimate of KL(policy || reference) of each token: exp(d) - d - 1 with d = reference - logprobs; float32 [N].

    Computed in float32. A gap above `MAX_KL_GAP` saturates: bounding the input and not the output keeps the gradient
    finite (0 times an infinite exponential would be NaN).
    """
    gap = (reference.float() - logprobs.float()).clamp(max=MAX_KL_GAP)
    return torch.exp(gap) - gap - 1.0


def _where_loss(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
