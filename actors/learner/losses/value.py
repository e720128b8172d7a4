# pyright: basic
# torch is only partly typed.
"""Clipped value loss of a critic (PPO as published by its authors in code; arXiv 2005.12729, section 3, describes it).

    loss of a token = max( (V - R)^2, (clip(V, V_old - range, V_old + range) - R)^2 ) / 2

V_old are the values that were stored when the samples were made: recomputed with the current weights they would equal V
and the clip would do nothing. The clip fraction compares the unclipped change with the range; the clipped one never
exceeds it.
"""

from typing import TYPE_CHECKING, Any

import torch

from headrace.actors.learner.losses.contribution import LossContribution
from headrace.actors.learner.losses.masking import check_columns, where_loss
from headrace.actors.learner.losses.normalization import Normalization, normalize_tokens
from headrace.engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

_TOKEN_MEAN = Normalization()


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    clip_range: float,
    num_loss_tokens: int,
    num_sequences: int,
    normalization: Normalization = _TOKEN_MEAN,
) -> LossContribution:
    """The value loss of one micro-batch, already divided by the step's count.

    Args:
        values: float [N], the critic's, with gradient; ignored where `mask` is False, as the others are.
        old_values: float [N], stored when the samples were made.
        returns: float [N].
        mask: bool [N], loss tokens.
        sequence_ids: int64 [N].
        clip_range: Half the width of the clip around the old value; 0 does not clip.
        num_loss_tokens: Of the whole step.
        num_sequences: Sequences with a loss token in the whole step.
        normalization: What the loss is a mean over.

    Returns:
        The loss and, in `sums`: value_loss, value_clipfrac, value, return.

    Raises:
        InputError: A column has another shape than the mask.
        ConfigError: The clip range is negative.
    """
    check_columns(mask, values=values, old_values=old_values, returns=returns, sequence_ids=sequence_ids)
    current, old, target = (where_loss(mask, column) for column in (values, old_values.detach(), returns.detach()))
    loss, clipped = clipped_value_error(current, old, target, clip_range=clip_range)
    reduced = normalize_tokens(
        loss,
        mask,
        sequence_ids,
        normalization=normalization,
        num_loss_tokens=num_loss_tokens,
        num_sequences=num_sequences,
    )
    sums = {
        "value_loss": where_loss(mask, loss).sum(),
        "value_clipfrac": (clipped & mask).sum(),
        "value": current.sum(),
        "return": target.sum(),
    }
    return LossContribution.of(reduced, sums)


def clipped_value_error(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip_range: float
) -> tuple[Tensor, Tensor]:
    """Half the larger squared error of each token.

    Args:
        values, old_values, returns: float [N].
        clip_range: Half the width of the clip around the old value; 0 does not clip.

    Returns:
        Loss float [N], and bool [N]: where the value left the range.

    Raises:
        ConfigError: The clip range is negative.
    """
    if not clip_range >= 0:
        raise ConfigError(f"the clip range of the value loss is {clip_range}: it must be above 0, or 0 for off")
    error = (values - returns) ** 2
    if clip_range == 0:
        return error / 2, torch.zeros_like(values, dtype=torch.bool)
    change = values - old_values
    bounded = old_values + change.clamp(-clip_range, clip_range)
    return torch.maximum(error, (bounded - returns) ** 2) / 2, change.detach().abs() > clip_range
