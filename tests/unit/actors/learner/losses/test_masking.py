"""Sums over sequences of a packed micro-batch."""

import pytest
import torch

from headrace.actors.learner.losses.masking import (
    check_columns,
    require_column,
    sequence_counts,
    sequence_mean,
    sequence_sum,
    sequence_totals,
    where_loss,
)
from headrace.engine.errors import InputError

VALUES = torch.tensor([1.0, 3.0, 100.0, 10.0, float("nan")])
MASK = torch.tensor([True, True, False, True, False])
IDS = torch.tensor([0, 0, 0, 1, 2])


def test_sums_and_means_ignore_masked_tokens_and_other_sequences() -> None:
    assert sequence_totals(VALUES, MASK, IDS).tolist() == [4.0, 10.0, 0.0]
    assert sequence_counts(MASK, IDS, dtype=torch.float64).tolist() == [2.0, 1.0, 0.0]
    assert sequence_sum(VALUES, MASK, IDS).tolist() == [4.0, 4.0, 4.0, 10.0, 0.0]
    assert sequence_mean(VALUES, MASK, IDS).tolist() == [2.0, 2.0, 2.0, 10.0, 0.0]


def test_the_gradient_of_a_masked_token_is_zero_whatever_stands_there() -> None:
    leaf = VALUES.clone().requires_grad_()
    sequence_mean(leaf, MASK, IDS)[:2].sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert where_loss(MASK, VALUES).tolist() == [1.0, 3.0, 0.0, 10.0, 0.0]


def test_no_token_at_all_gives_no_sequence() -> None:
    none = torch.zeros(0)
    ids = torch.zeros(0, dtype=torch.int64)
    assert sequence_totals(none, none.bool(), ids).shape == (0,)
    assert sequence_mean(none, none.bool(), ids).shape == (0,)


@pytest.mark.parametrize("mask", [MASK.to(torch.uint8), MASK.float(), MASK[None]])
def test_a_mask_that_is_not_one_bool_a_token_is_refused(mask: torch.Tensor) -> None:
    with pytest.raises(InputError, match="bool"):
        check_columns(mask)


def test_a_column_of_another_length_is_refused_by_name() -> None:
    check_columns(MASK, absent=None, there=VALUES)
    with pytest.raises(InputError, match=r"advantages has the shape \[4\] beside a loss_mask of shape \[5\]"):
        check_columns(MASK, advantages=VALUES[:4])


def test_a_missing_column_is_refused_unless_no_token_takes_part() -> None:
    assert require_column(VALUES, MASK, name="values", reason="x") is VALUES
    with pytest.raises(InputError, match="no reference_logprobs: because"):
        require_column(None, MASK, name="reference_logprobs", reason="because")
    assert require_column(None, MASK & False, name="reference_logprobs", reason="because").tolist() == [0.0] * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_are_taken_in_single_precision(dtype: torch.dtype) -> None:
    """A bfloat16 that counts by ones stops at 256: the mean of a long sequence would be that of a short one."""
    ones = torch.ones(3000, dtype=dtype)
    mask, ids = torch.ones(3000, dtype=torch.bool), torch.zeros(3000, dtype=torch.int64)
    assert sequence_counts(mask, ids, dtype=dtype).tolist() == [3000.0]
    assert sequence_totals(ones, mask, ids).tolist() == [3000.0]
    assert sequence_mean(ones * 0.5, mask, ids).unique().tolist() == [0.5]
