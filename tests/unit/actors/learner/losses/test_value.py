"""The critic's clipped loss."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.losses.normalization import Normalization
from headrace.actors.learner.losses.value import clipped_value_error, value_loss
from headrace.engine.errors import ConfigError, InputError


def test_value_clip_takes_the_larger_error_and_the_stored_values() -> None:
    """K-086: both cases, their derivatives, and a clip fraction of the unclipped change."""
    values = torch.tensor([3.0, 2.6], requires_grad=True)
    loss, clipped = clipped_value_error(values, torch.tensor([2.0, 2.0]), torch.tensor([2.5, 3.0]), clip_range=0.2)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0.125, 0.32], abs=1e-6)
    assert values.grad is not None and values.grad.tolist() == pytest.approx([0.5, 0.0])
    assert clipped.float().mean().item() == 1.0


def test_value_clip_does_nothing_against_recomputed_values_or_when_off() -> None:
    """K-086: old values from the current weights make the clip idle; 0 turns it off."""
    values = torch.tensor([3.0, 2.6], requires_grad=True)
    returns = torch.tensor([2.5, 3.0])
    for old, clip_range in ((values.detach(), 0.2), (torch.tensor([2.0, 2.0]), 0.0)):
        values.grad = None
        loss, clipped = clipped_value_error(values, old, returns, clip_range=clip_range)
        loss.sum().backward()
        assert loss.tolist() == pytest.approx([0.125, 0.08])
        assert values.grad is not None and values.grad.tolist() == pytest.approx([0.5, -0.4])
        assert not clipped.any()


@pytest.mark.parametrize("clip_range", [-0.1, float("nan")])
def test_a_negative_range_is_refused(clip_range: float) -> None:
    with pytest.raises(ConfigError, match="0 for off"):
        clipped_value_error(torch.zeros(1), torch.zeros(1), torch.zeros(1), clip_range=clip_range)


def test_a_column_of_another_shape_is_refused() -> None:
    mask, ids, two = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    with pytest.raises(InputError, match="old_values has the shape"):
        value_loss(two, two[:1], two, mask, ids, clip_range=0.2, num_loss_tokens=2, num_sequences=1)


def by_loops(samples: Sequence[Any], unit: str) -> float:
    """The columns stand for: current = value, proximal = old value, teacher = return."""
    rows = []
    for s in samples:
        row = []
        for t in s.tokens():
            bounded = min(max(s.current[t], s.proximal[t] - 0.3), s.proximal[t] + 0.3)
            row.append(0.5 * max((s.current[t] - s.teacher[t]) ** 2, (bounded - s.teacher[t]) ** 2))
        if row:
            rows.append(row)
    if not rows:
        return 0.0
    tokens = [x for row in rows for x in row]
    return sum(sum(r) / len(r) for r in rows) / len(rows) if unit == "sequence" else sum(tokens) / len(tokens)


@pytest.mark.parametrize("unit", ["token", "sequence"])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_value_and_gradient_agree_with_loops_and_finite_differences(kit: Any, unit: Any, seed: int) -> None:
    samples = kit.draw(seed)

    def loss(inputs: Any) -> Any:
        return value_loss(
            inputs.logprobs,
            inputs.proximal_logprobs,
            inputs.teacher_logprobs,
            inputs.loss_mask,
            inputs.sequence_ids,
            clip_range=0.3,
            num_loss_tokens=inputs.num_loss_tokens,
            num_sequences=inputs.num_sequences,
            normalization=Normalization(unit=unit),
        )

    found = kit.run(loss, samples)
    assert found.loss == pytest.approx(by_loops(samples, unit), abs=1e-12)
    kit.assert_same(found.gradients, kit.slopes(lambda moved: by_loops(moved, unit), samples))
    tokens = [(s, t) for s in samples for t in s.tokens()]
    assert found.sums["value_clipfrac"] == sum(abs(s.current[t] - s.proximal[t]) > 0.3 for s, t in tokens)
    assert found.sums["value_loss"] == pytest.approx(by_loops(samples, "token") * len(tokens))
    assert found.sums["value"] == pytest.approx(sum(s.current[t] for s, t in tokens))
    assert found.sums["return"] == pytest.approx(sum(s.teacher[t] for s, t in tokens))
