"""CISPO: a clipped, detached weight times the log-probability."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.losses.cispo import cispo_loss, clipped_weight_surrogate
from headrace.actors.learner.losses.policy import PolicyLossOptions


def surrogate(samples: Sequence[Any], frozen: Sequence[Any], options: PolicyLossOptions) -> float:
    """Equation 4, negated: the weight from `frozen`, the log-probability from `samples`; a token mean."""
    terms = []
    for s, f in zip(samples, frozen, strict=True):
        for t in s.tokens():
            ratio = math.exp(f.current[t] - f.proximal[t])
            ratio = min(max(ratio, 1 - options.clip_low), 1 + options.clip_high)
            terms.append(-min(math.exp(s.proximal[t] - s.behaviour[t]), 2.0) * ratio * s.advantages[t] * s.current[t])
    return sum(terms) / len(terms) if terms else 0.0


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_value_and_gradient_agree_with_the_equation(kit: Any, seed: int) -> None:
    options = PolicyLossOptions(clip_low=0.3, clip_high=0.4)
    samples = kit.draw(seed)
    found = kit.run(lambda i: cispo_loss(i, options), samples)
    assert found.loss == pytest.approx(surrogate(samples, samples, options), abs=1e-12)
    kit.assert_same(found.gradients, kit.slopes(lambda moved: surrogate(moved, samples, options), samples))


def test_no_token_loses_its_gradient_to_the_clip() -> None:
    """Where PPO's clip gives 0 (K-065, pairs 1, 3 and 6) the gradient stays, at the bound."""
    ratios = torch.tensor([1.5, 0.5, 0.5, 1.5, 1.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0])
    leaf = ratios.log().requires_grad_()
    loss, clipped = clipped_weight_surrogate(leaf, leaf, advantages, PolicyLossOptions())
    loss.sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == pytest.approx([-1.28, -0.8, 0.8, 1.28, -2.0])
    assert clipped.tolist() == [True, True, True, True, False]


def test_a_lower_range_of_one_sets_no_lower_bound() -> None:
    leaf = torch.tensor([-5.0], requires_grad=True)
    loss, clipped = clipped_weight_surrogate(leaf, leaf, torch.ones(1), PolicyLossOptions(clip_low=1.0))
    loss.sum().backward()
    assert leaf.grad is not None and leaf.grad.item() == pytest.approx(-math.exp(-5.0))
    assert not clipped.any()


def test_a_huge_ratio_stays_finite() -> None:
    leaf = torch.tensor([400.0], requires_grad=True)
    loss, _ = clipped_weight_surrogate(leaf, leaf, -torch.ones(1), PolicyLossOptions())
    loss.sum().backward()
    assert leaf.grad is not None and leaf.grad.item() == pytest.approx(1.28)
