# pyright: basic
# torch is only partly typed.
"""Masked tokens and sums over sequences, for losses over packed micro-batches.

Invariants:
- A masked token is replaced before anything non-linear touches it. A NaN or an infinity that stands there can then make
  neither a value nor a gradient non-finite: multiplying by a mask of 0 would leave NaN in both.
- Half precision becomes float32 here, where each column enters a loss: a bfloat16 that counts by ones stops at 256, and
  exp(20) is more than a float16 holds.
"""

from typing import TYPE_CHECKING, Any

import torch

from headrace.engine.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


def where_loss(mask: Tensor, values: Tensor) -> Tensor:
    """`values` where the bool mask holds, else 0; of the shape of both, at least float32, differentiable."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def sequence_totals(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Sum over the masked-in tokens of each sequence: [S], 0 for a sequence without one; differentiable.

    Args:
        values: float [N]; ignored where `mask` is False, also when not finite.
        mask: bool [N].
        sequence_ids: int64 [N], from 0; S is the largest plus 1.
    """
    num_sequences = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
    zeros = values.new_zeros(num_sequences, dtype=torch.promote_types(values.dtype, torch.float32))
    return zeros.index_add(0, sequence_ids, where_loss(mask, values))


def sequence_counts(mask: Tensor, sequence_ids: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Masked-in tokens of each sequence: [S] of the given float type, at least float32."""
    return sequence_totals(mask.to(dtype), mask, sequence_ids)


def sequence_sum(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Sum over the masked-in tokens of each sequence, given back to each of its tokens: [N]; differentiable."""
    return sequence_totals(values, mask, sequence_ids)[sequence_ids]


def sequence_mean(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Mean over the masked-in tokens of each sequence, given back to each of its tokens: [N]; differentiable."""
    counts = sequence_counts(mask, sequence_ids, dtype=values.dtype).clamp(min=1.0)
    return (sequence_totals(values, mask, sequence_ids) / counts)[sequence_ids]


def check_columns(mask: Tensor, **columns: Tensor | None) -> None:
    """Columns must stand beside the mask, token for token; None is an absent column.

    Raises:
        InputError: The mask is not bool [N], or a column has another shape.
    """
    if mask.dtype != torch.bool or mask.ndim != 1:
        raise InputError(
            f"loss_mask is {mask.dtype} of shape {list(mask.shape)}: it must be bool [N]; compare it with 0 first"
        )
    for name, column in columns.items():
        if column is not None and column.shape != mask.shape:
            raise InputError(
                f"{name} has the shape {list(column.shape)} beside a loss_mask of shape {list(mask.shape)}: "
                "give one value a token"
            )


def require_column(column: Tensor | None, mask: Tensor, *, name: str, reason: str) -> Tensor:
    """The column; zeros for an absent one where no token takes part, as in a micro-batch that only pads.

    Raises:
        InputError: The column is absent and there are loss tokens; says who needs it.
    """
    if column is not None:
        return column
    if bool(mask.any()):
        raise InputError(f"the micro-batch has no {name}: {reason}")
    return torch.zeros(mask.shape, device=mask.device)
