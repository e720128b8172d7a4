"""Sequence ratios: GSPO's objective, from its equations."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.losses.gspo import gspo_loss, sequence_log_ratio
from headrace.actors.learner.losses.normalization import Normalization
from headrace.actors.learner.losses.policy import PolicyLossOptions, clipped_surrogate
from headrace.engine.config.algorithm import ImportanceConfig

BY_SEQUENCE = Normalization(unit="sequence")


def sequence_ratio(s: Any) -> float:
    gaps = [s.current[t] - s.proximal[t] for t in s.tokens()]
    return math.exp(sum(gaps) / len(gaps))


def objective(samples: Sequence[Any], options: PolicyLossOptions) -> float:
    """Equation 5, negated: one ratio, one clip and one advantage a sequence; the ratio itself is differentiated."""
    terms = []
    for s in samples:
        if s.tokens():
            ratio, a = sequence_ratio(s), s.advantages[s.tokens()[0]]
            terms.append(min(ratio * a, min(max(ratio, 1 - options.clip_low), 1 + options.clip_high) * a))
    return -sum(terms) / len(terms) if terms else 0.0


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_with_credit_of_sequences_value_and_gradient_are_those_of_equation_5(kit: Any, seed: int) -> None:
    options = PolicyLossOptions(
        clip_low=0.1, clip_high=0.15, importance=ImportanceConfig(kind="none"), normalization=BY_SEQUENCE
    )
    samples = kit.draw(seed, scalar_credit=True)
    found = kit.run(lambda i: gspo_loss(i, options), samples)
    assert found.loss == pytest.approx(objective(samples, options), abs=1e-12)
    kit.assert_same(found.gradients, kit.slopes(lambda moved: objective(moved, options), samples))


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_with_credit_of_tokens_it_is_the_token_form(kit: Any, seed: int) -> None:
    """Equations 13 and 14: the value of a sequence's ratio, the gradient of the token; and the sampler's weight."""
    options = PolicyLossOptions(clip_low=0.1, clip_high=0.15, normalization=BY_SEQUENCE)
    samples = kit.draw(seed)
    found = kit.run(lambda i: gspo_loss(i, options), samples)
    total = clipped = 0.0
    real = sum(bool(s.tokens()) for s in samples)
    for s, gradient in zip(samples, found.gradients, strict=True):
        for t in s.tokens():
            ratio, a = sequence_ratio(s), s.advantages[t]
            weight = min(math.exp(s.proximal[t] - s.behaviour[t]), 2.0)
            bounded = min(max(ratio, 0.9), 1.15)
            inside = ratio * a <= bounded * a
            scale = weight / len(s.tokens()) / real
            assert gradient[t] == pytest.approx(-scale * a * ratio if inside else 0.0, abs=1e-12)
            total -= scale * min(ratio * a, bounded * a)
            clipped += not inside
    assert found.loss == pytest.approx(total, abs=1e-12)
    assert found.sums["clipfrac"] == clipped


@pytest.mark.parametrize("advantages", [[1.0, -1.0], [-1.0, 1.0]])
def test_ratio_exponent_bound_is_on_the_mean_of_a_sequence(advantages: list[float]) -> None:
    """K-066: log-ratios 90 and -90 have ratio 1 and a normal gradient; 400 and 400 stay finite through an update."""
    mask, ids = torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    leaf = torch.nn.Parameter(torch.tensor([90.0, -90.0, 400.0, 400.0]))
    log_ratio = sequence_log_ratio(leaf, leaf, mask, ids)
    loss, _ = clipped_surrogate(log_ratio, torch.tensor(advantages).repeat_interleave(2), PolicyLossOptions())
    assert loss[:2].tolist() == [-advantages[0]] * 2  # the ratio is exactly 1
    optimizer = torch.optim.AdamW([leaf], lr=0.1)
    loss.sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()
    assert leaf.grad[:2].tolist() == [-advantages[0]] * 2
    optimizer.step()
    assert loss.isfinite().all() and leaf.isfinite().all()


def test_with_one_update_a_batch_the_ratio_is_one_and_nothing_is_clipped(kit: Any) -> None:
    samples = kit.draw(3)
    options = PolicyLossOptions(clip_low=0.0, clip_high=0.0, normalization=BY_SEQUENCE)
    inputs = kit.pack(samples)
    same = kit.pack(samples, proximal_logprobs=inputs.logprobs.detach())
    output = gspo_loss(same, options)
    assert output.sums["clipfrac"].item() == 0
    output.loss.backward()
    assert same.logprobs.grad.abs().sum() > 0
