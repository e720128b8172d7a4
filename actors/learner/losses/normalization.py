# pyright: basic
# torch is only partly typed.
"""From losses of tokens to the loss of a step: token mean, sequence mean, or a constant length.

With T loss tokens and S sequences in the whole step, over all ranks and micro-batches, and l the loss of a token:

    token       sum of l / T                        DAPO, arXiv 2503.14476, equation 12
    sequence    sum over sequences of mean(l) / S   GRPO, arXiv 2402.03300, equation 3
    constant    sum of l / (length x S)             Dr. GRPO, arXiv 2503.20783, section 3.2

Invariants:
- A micro-batch contributes its sum divided by counts of the whole step, never by its own: the cut into micro-batches
  and ranks changes nothing. Ranks add up; where gradients are averaged, the loss is multiplied by their number.
- No padded width enters: a constant length comes from the configuration.
- A rejected token leaves numerator and denominator alike. How many there are is known only after the forward pass, so
  the planned denominator is used here and `rejected` tells by how much it was too large. The step's loss is
  sum(loss) x denominator / (denominator - sum(rejected)).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from headrace.actors.learner.losses.masking import sequence_counts, sequence_totals, where_loss
from headrace.engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Unit = Literal["token", "sequence", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalization:
    """What the loss is a mean over.

    Attributes:
        unit: See the module.
        length: Tokens, of the constant length; read with "constant" only.
        fixed: Rejected tokens stay in the denominator, so that rejecting much also makes the step small.
    """

    unit: Unit = "token"
    length: int = 0
    fixed: bool = False

    def __post_init__(self) -> None:
        if self.unit not in ("token", "sequence", "constant"):
            raise ConfigError(f"normalization is {self.unit!r}: it must be token, sequence or constant")
        if self.unit == "constant" and self.length < 1:
            raise ConfigError(
                f"normalization is constant with a length of {self.length}: set algorithm.length_constant to the "
                "longest response of the run, in tokens"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """One micro-batch's part.

    Attributes:
        loss: float [], divided by `denominator`; connected to the graph of the values.
        denominator: Tokens, sequences, or length x sequences of the whole step, at least 1.
        rejected: float32 [], how many of those units this micro-batch lost to rejection; 0 when fixed.
    """

    loss: Tensor
    denominator: float
    rejected: Tensor


def normalize_tokens(
    values: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    normalization: Normalization,
    num_loss_tokens: int,
    num_sequences: int,
    kept: Tensor | None = None,
) -> Reduced:
    """Reduce the losses of tokens to this micro-batch's part of the step's loss.

    A sequence mean is over the tokens of the sequence that were kept, and a wholly rejected sequence does not count.
    A constant length shrinks by whole sequences alone: it does not depend on how many tokens there are.

    Args:
        values: float [N], with gradient; ignored where `mask` is False.
        mask: bool [N], loss tokens.
        sequence_ids: int64 [N]; each sequence is whole.
        normalization: What the loss is a mean over.
        num_loss_tokens: Of the whole step; 0 gives 0.
        num_sequences: Sequences with a loss token in the whole step.
        kept: bool [N], False on rejected tokens; None keeps all.

    Returns:
        The part; exactly 0 and connected when no token takes part.
    """
    taking = mask if kept is None else mask & kept
    planned = sequence_counts(mask, sequence_ids, dtype=values.dtype)
    remaining = sequence_counts(taking, sequence_ids, dtype=values.dtype)
    lost_sequences = ((planned > 0) & (remaining == 0)).sum()
    if normalization.unit == "token":
        total, denominator = where_loss(taking, values).sum(), num_loss_tokens
        rejected = (mask & ~taking).sum()
    elif normalization.unit == "sequence":
        counts = planned if normalization.fixed else remaining
        total = (sequence_totals(values, taking, sequence_ids) / counts.clamp(min=1.0)).sum()
        denominator, rejected = num_sequences, lost_sequences
    else:
        total, denominator = where_loss(taking, values).sum(), normalization.length * num_sequences
        rejected = normalization.length * lost_sequences
    rejected = rejected.to(torch.float32)
    divisor = float(max(1, denominator))
    return Reduced(
        loss=total / divisor,
        denominator=divisor,
        rejected=torch.zeros_like(rejected) if normalization.fixed else rejected,
    )
