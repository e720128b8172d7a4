"""On-policy distillation: credit from a teacher, and the divergence that it descends."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.losses.distillation import distillation_loss, teacher_advantages
from headrace.actors.learner.losses.kl import MAX_KL_GAP
from headrace.actors.learner.losses.policy import PolicyLossOptions
from headrace.engine.config.algorithm import ImportanceConfig
from headrace.engine.errors import InputError


@pytest.mark.parametrize("corrected", [False, True])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_the_expected_gradient_is_that_of_the_reverse_divergence(kit: Any, corrected: bool, seed: int) -> None:
    """One state, six outcomes, summed exactly; drawn from the student itself, or from a sampler and weighed."""
    rng = np.random.default_rng(seed)
    teacher = torch.tensor(np.log(rng.dirichlet(np.ones(6) * 3)))
    sampler = torch.tensor(np.log(rng.dirichlet(np.ones(6) * 3)))
    options = PolicyLossOptions(importance=ImportanceConfig(cap=1e9))
    logits = torch.tensor(rng.normal(size=6), requires_grad=True)
    logprobs = torch.log_softmax(logits, -1)
    behaviour = sampler if corrected else logprobs.detach()
    for outcome in range(6):
        inputs = kit.pack(
            [],
            logprobs=logprobs[outcome : outcome + 1],
            proximal_logprobs=logprobs[outcome : outcome + 1].detach(),
            behaviour_logprobs=behaviour[outcome : outcome + 1],
            teacher_logprobs=teacher[outcome : outcome + 1],
            reference_logprobs=None,
            entropy=None,
            advantages=torch.full((1,), float("nan")),  # not read
            loss_mask=torch.ones(1, dtype=torch.bool),
            sequence_ids=torch.zeros(1, dtype=torch.int64),
            num_loss_tokens=1,
        )
        probability = behaviour[outcome].exp()
        (probability * distillation_loss(inputs, options).loss).backward(retain_graph=True)
    truth = logits.detach().clone().requires_grad_()
    student = torch.log_softmax(truth, -1)
    (student.exp() * (student - teacher)).sum().backward()
    torch.testing.assert_close(logits.grad, truth.grad)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_each_token_is_credited_with_teacher_minus_student(kit: Any, seed: int) -> None:
    samples = kit.draw(seed)
    options = PolicyLossOptions(clip_low=10.0, clip_high=10.0)
    found = kit.run(lambda i: distillation_loss(i, options), samples)
    count = max(1, sum(len(s.tokens()) for s in samples))
    for s, gradient in zip(samples, found.gradients, strict=True):
        for t in s.tokens():
            weight = min(math.exp(s.proximal[t] - s.behaviour[t]), 2.0) * math.exp(s.current[t] - s.proximal[t])
            assert gradient[t] == pytest.approx(-weight * (s.teacher[t] - s.current[t]) / count, abs=1e-12)
    divergence = sum(s.current[t] - s.teacher[t] for s in samples for t in s.tokens())
    assert found.sums["teacher_kl"] == pytest.approx(divergence)


def test_a_token_that_the_teacher_excludes_does_not_decide_the_step() -> None:
    student = torch.tensor([-1.0, -2.0, -0.5])
    teacher = torch.tensor([float("-inf"), -1.5, float("nan")])
    mask = torch.tensor([True, True, False])
    assert teacher_advantages(student, teacher, mask).tolist() == [-MAX_KL_GAP, 0.5, 0.0]
    assert teacher_advantages(student, teacher, mask, max_gap=0.25).tolist() == [-0.25, 0.25, 0.0]


def test_a_micro_batch_without_a_teacher_is_refused(kit: Any) -> None:
    with pytest.raises(InputError, match="no teacher_logprobs"):
        distillation_loss(kit.pack(kit.draw(1), teacher_logprobs=None), PolicyLossOptions())
