"""Estimates of the distance to a reference policy, their values and what they descend."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.losses.kl import MAX_KL_GAP, Estimator, k3_kl, kl_loss, kl_value
from headrace.engine.errors import ConfigError

Terms = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def expected_gradient(logits: torch.Tensor, reference: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Mean gradient with respect to the logits of a term of one sample, over all outcomes of the policy itself."""
    leaf = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(leaf, -1)
    (logprobs.detach().exp() * terms(logprobs, reference)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def true_gradient(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    leaf = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(leaf, -1)
    (logprobs.exp() * (logprobs - reference)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_k3_overflow_saturates_without_poisoning_value_or_gradient() -> None:
    """K-010, in float32 and bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        logp = torch.zeros(3, dtype=dtype, requires_grad=True)
        values = k3_kl(logp, torch.tensor([0.5, -0.5, 120.0], dtype=dtype))
        values.sum().backward()
        assert values.dtype == torch.float32
        assert values[:2].tolist() == pytest.approx([0.148721, 0.106531], abs=1e-6)
        assert values.isfinite().all()
        assert logp.grad is not None and logp.grad.isfinite().all()
        assert logp.grad[:2].tolist() == pytest.approx(
            [-0.648721, 0.393469], abs=1e-6 if dtype == torch.float32 else 4e-3
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("estimator", ["k2", "k3", "unbiased"])
def test_k3_overflow_leaves_every_parameter_finite_after_an_optimizer_step(
    estimator: Estimator, dtype: torch.dtype
) -> None:
    """K-010, with gaps in both directions, infinite ones too."""
    reference = torch.tensor([0.5, -0.5, 120.0, -120.0, math.inf, -math.inf], dtype=dtype)
    logp = torch.nn.Parameter(torch.zeros(6, dtype=dtype))
    optimizer = torch.optim.AdamW([logp], lr=0.1)
    loss = 0.1 * kl_loss(logp, reference, estimator=estimator).sum()
    loss.backward()
    optimizer.step()
    assert loss.isfinite() and logp.isfinite().all()


def test_kl_as_loss_gradient_is_that_of_the_table() -> None:
    """K-084: derivative with respect to the first logit, averaged exactly over both outcomes."""
    logits = torch.zeros(2, dtype=torch.float64)
    reference = torch.tensor([0.9, 0.1], dtype=torch.float64).log()
    logprobs = torch.log_softmax(logits, -1)
    assert (logprobs.exp() * (logprobs - reference)).sum().item() == pytest.approx(0.510826, abs=1e-6)
    assert true_gradient(logits, reference)[0].item() == pytest.approx(-0.549306, abs=1e-6)
    for estimator, expected in (("k2", -0.549306), ("k3", -0.4), ("unbiased", -0.549306)):
        found = expected_gradient(logits, reference, lambda p, r, e=estimator: kl_loss(p, r, estimator=e))
        assert found[0].item() == pytest.approx(expected, abs=1e-6), estimator
    # What k1 would give, and why it is refused.
    assert expected_gradient(logits, reference, lambda p, r: p - r)[0].item() == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ConfigError, match="averages to 0"):
        kl_loss(logprobs, reference, estimator="k1")


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_kl_as_loss_gradient_holds_for_any_pair_of_policies(seed: int) -> None:
    """K-084: k2 and unbiased descend KL(policy || reference); k3 descends KL(reference || policy)."""
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(size=5))
    reference = torch.log_softmax(torch.tensor(rng.normal(size=5)), -1)
    truth = true_gradient(logits, reference)
    for estimator in ("k2", "unbiased"):
        found = expected_gradient(logits, reference, lambda p, r, e=estimator: kl_loss(p, r, estimator=e))
        torch.testing.assert_close(found, truth)
    policy = torch.softmax(logits, -1)
    other = expected_gradient(logits, reference, lambda p, r: kl_loss(p, r, estimator="k3"))
    torch.testing.assert_close(other, policy - reference.exp())  # of the cross entropy under the reference


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_the_unbiased_gradient_holds_for_samples_of_another_policy_with_its_weight(seed: int) -> None:
    rng = np.random.default_rng(seed)
    leaf = torch.tensor(rng.normal(size=5), requires_grad=True)
    reference = torch.log_softmax(torch.tensor(rng.normal(size=5)), -1)
    sampler = torch.softmax(torch.tensor(rng.normal(size=5)), -1)
    logprobs = torch.log_softmax(leaf, -1)
    weight = logprobs.exp() / sampler  # with gradient: none may flow through it
    (sampler * kl_loss(logprobs, reference, estimator="unbiased", weight=weight)).sum().backward()
    torch.testing.assert_close(leaf.grad, true_gradient(leaf.detach(), reference))


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_values_agree_with_their_formulas_and_average_to_the_divergence(seed: int) -> None:
    rng = np.random.default_rng(seed)
    policy, reference = (np.log(rng.dirichlet(np.ones(6) * 3)) for _ in range(2))
    d = reference - policy
    formulas = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1, "unbiased": np.exp(d) - d - 1}
    for name, formula in formulas.items():
        value = kl_value(torch.tensor(policy, requires_grad=True), torch.tensor(reference), estimator=name)  # type: ignore[arg-type]
        assert not value.requires_grad
        np.testing.assert_allclose(value.numpy(), formula, atol=1e-12)
    divergence = float((np.exp(policy) * (policy - reference)).sum())
    for name in ("k1", "k3"):
        assert float((np.exp(policy) * formulas[name]).sum()) == pytest.approx(divergence)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_gradients_agree_with_finite_differences(estimator: Estimator) -> None:
    logp = torch.linspace(-6, 0, 25, dtype=torch.float64, requires_grad=True)
    reference = torch.linspace(-1, -4, 25, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda p: kl_loss(p, reference, estimator=estimator), (logp,))


def test_beyond_the_largest_gap_gradients_saturate_and_still_pull_back() -> None:
    far = torch.tensor([50.0, -50.0], dtype=torch.float64)
    gradients = {}
    for estimator in ("k2", "k3", "unbiased"):
        logp = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        kl_loss(logp, far, estimator=estimator).sum().backward()  # type: ignore[arg-type]
        assert logp.grad is not None
        gradients[estimator] = logp.grad.tolist()
    assert gradients["k2"] == gradients["unbiased"] == [-MAX_KL_GAP, MAX_KL_GAP]
    assert gradients["k3"] == [0.0, 1.0]


def test_no_gradient_flows_into_the_reference() -> None:
    logp, reference = (torch.tensor([-1.0], requires_grad=True) for _ in range(2))
    for estimator in ("k2", "k3", "unbiased"):
        kl_loss(logp, reference * 2, estimator=estimator).sum().backward()  # type: ignore[arg-type]
    assert reference.grad is None


def test_the_value_of_unbiased_is_that_of_k3() -> None:
    logp, reference = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -1.0])
    weight = torch.tensor([0.5, 2.0])
    torch.testing.assert_close(kl_loss(logp, reference, estimator="unbiased", weight=weight), kl_value(logp, reference))
