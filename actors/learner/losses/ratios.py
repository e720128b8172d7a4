# pyright: basic
# torch is only partly typed.
"""Importance weights: correction for the difference between the policy that sampled and the one that learns.

With gap = proximal - behaviour log-probability of each token, in nats, and |y| the loss tokens of its sequence:

    token      exp(gap)                  one weight a token
    sequence   exp(sum(gap) / |y|)       geometric mean over the sequence
    product    exp(sum(gap))             the textbook weight of a whole sequence

    tis        min(weight, cap): some bias for a bounded variance (V-trace truncates so: arXiv 1802.01561, section 4.1)
    mask       weight, token rejected above the cap
    none       1

The product shrinks or explodes with the length: a harmless gap of 0.001 nat makes it 0.135 after 2000 tokens. So the
geometric mean is what "sequence" means here, and `collapsed_weight_warning` speaks up when the product is asked for.

Invariants:
- Weights carry no gradient.
- An exponent is bounded where the weight is formed: on the mean or the sum of a sequence, not on each of its tokens.
- Rejection by sequence and truncation by token are independent: the first decides who takes part, the second how much.
- A rejected token has a bounded weight of its own; who uses it has to select by `kept`, not to multiply by it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from headrace.actors.learner.losses.masking import sequence_mean, sequence_sum, where_loss
from headrace.engine.config.algorithm import ImportanceConfig
from headrace.engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

# exp(20) = 4.9e8: far beyond any useful ratio, far from the end of float32, also when two of them are multiplied.
MAX_LOG_RATIO = 20.0

# A mean weight this small beside a mean gap this small (nats a token) comes from the length, not from the policies.
_COLLAPSED_WEIGHT = 0.5
_HARMLESS_GAP = 0.01

Level = Literal["token", "sequence", "product"]
Kind = Literal["tis", "mask", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceWeights:
    """Weights of one micro-batch, all detached.

    Attributes:
        gap: float [N], proximal minus behaviour log-probability in nats; 0 on masked tokens.
        raw: float [N], before truncation; 1 on masked tokens of level "token".
        weight: float [N], what multiplies the policy loss; finite everywhere.
        kept: bool [N], loss tokens that no rule rejected.
    """

    gap: Tensor
    raw: Tensor
    weight: Tensor
    kept: Tensor


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp with its exponent bounded to +-`MAX_LOG_RATIO`; no gradient beyond."""
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def importance_weights(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, sequence_ids: Tensor, options: ImportanceConfig
) -> ImportanceWeights:
    """Weights and rejections of one micro-batch.

    Args:
        proximal: float [N], nats; of the policy at the start of the step.
        behaviour: float [N], nats; of the sampler. Both are ignored on masked tokens, also when not finite.
        mask: bool [N], loss tokens.
        sequence_ids: int64 [N].
        options: Level, kind, cap and the bounds of sequence rejection; `fixed_denominator` is not read here.

    Raises:
        ConfigError: The cap is not positive, or the bounds of rejection leave nothing between them.
    """
    _check(options)
    gap = where_loss(mask, proximal.detach()) - where_loss(mask, behaviour.detach())
    raw = importance_ratio(gap, mask, sequence_ids, level=options.level)
    weight = truncate_weight(raw, kind=options.kind, cap=options.cap)
    kept = mask
    if options.kind == "mask":
        kept = kept & (raw <= options.cap)
    if options.reject_below or options.reject_above:
        kept = kept & within_sequence_bounds(
            gap, mask, sequence_ids, below=options.reject_below, above=options.reject_above
        )
    return ImportanceWeights(gap=gap, raw=raw, weight=weight, kept=kept)


def importance_ratio(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, *, level: Level) -> Tensor:
    """exp(log_ratio) at the given level, detached and bounded but not yet truncated: float [N].

    At "sequence" and "product" it is the same for all tokens of a sequence; over its loss tokens alone.
    """
    values = where_loss(mask, log_ratio.detach())
    if level == "sequence":
        values = sequence_mean(values, mask, sequence_ids)
    elif level == "product":
        values = sequence_sum(values, mask, sequence_ids)
    return bounded_exp(values)


def truncate_weight(raw: Tensor, *, kind: Kind, cap: float) -> Tensor:
    """What a weight becomes: at most the cap ("tis"), 0 above it ("mask"), or 1 ("none"); float [N]."""
    if kind == "tis":
        return raw.clamp(max=cap)
    if kind == "mask":
        return torch.where(raw > cap, torch.zeros_like(raw), raw)
    return torch.ones_like(raw)


def within_sequence_bounds(
    log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, *, below: float, above: float
) -> Tensor:
    """Whether a token's sequence has a geometric-mean ratio from `below` to `above`, both included: bool [N].

    A bound of 0 is off.
    """
    mean = importance_ratio(log_ratio, mask, sequence_ids, level="sequence")
    within = torch.ones_like(mask)
    if below:
        within = within & (mean >= below)
    if above:
        within = within & (mean <= above)
    return within


def effective_sample_size(weight_sum: float, weight_square_sum: float, count: float) -> float:
    """Kish's effective sample size as a fraction of `count`: (sum w)^2 / (count x sum w^2); 1 for equal weights.

    A rejected token has weight 0 and counts: then it is the share that still teaches. 0 when nothing has a weight.
    """
    if weight_square_sum <= 0 or count <= 0:
        return 0.0
    return weight_sum**2 / (count * weight_square_sum)


def collapsed_weight_warning(mean_weight: float, mean_absolute_gap: float) -> str | None:
    """A sentence when weights are small although the policies agree; else None.

    Args:
        mean_weight: Mean un-truncated weight over the step's loss tokens.
        mean_absolute_gap: Mean absolute gap of those tokens, nats.
    """
    if mean_weight >= _COLLAPSED_WEIGHT or mean_absolute_gap > _HARMLESS_GAP:
        return None
    return (
        f"importance weights average {mean_weight:.3g} although sampler and learner differ by only "
        f"{mean_absolute_gap:.2g} nats a token: the product over a sequence shrinks with its length, set "
        'algorithm.importance.level to "sequence" or "token"'
    )


def _check(options: ImportanceConfig) -> None:
    if not options.cap > 0:
        raise ConfigError(f"importance.cap is {options.cap}: it must be above 0; 2 is usual")
    if options.reject_above and not options.reject_above > options.reject_below:
        raise ConfigError(
            f"importance.reject_below is {options.reject_below} and reject_above {options.reject_above}: no sequence "
            "lies between them; raise reject_above, or set one of them to 0"
        )
