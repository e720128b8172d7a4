# pyright: basic
# torch is only partly typed.
"""The distance to a reference policy: estimates of KL(policy || reference) from one sampled token.

With d = reference - policy log-probability of the token, in nats (http://joschu.net/blog/kl-approx.html):

    estimator   value              gradient as a loss: factor of grad log policy, and what it descends in expectation
    k1          -d                 1: nothing, its expectation is 0; for the reward alone, refused as a loss
    k2          d^2 / 2            -d: KL(policy || reference)
    k3          exp(d) - d - 1     1 - exp(d): KL(reference || policy), the other direction
    unbiased    that of k3         -d x weight: KL(policy || reference), also of samples of an older policy

The expectation of a sample's gradient is not the gradient of the expectation: the samples come from the policy too. So
k3, an unbiased and nearly noiseless *value*, pulls towards covering the reference when it is used as a loss (GRPO,
arXiv 2402.03300, equation 4, does so). "unbiased" keeps its value and takes the gradient of the true divergence; with
an importance weight it is what DeepSeek-V3.2 (arXiv 2512.02556, equation 7) gets by differentiating weight x k3. All of
them are of the distribution at each visited state: that a token leads to later states where the policies differ more is
credited by a KL in the reward alone.

Invariant: a gap that is huge or infinite makes neither value nor gradient non-finite. Inputs are bounded, never
outputs: 0 times an infinite exponential would be NaN in the backward pass.
"""

from typing import TYPE_CHECKING, Any, Literal

import torch

from headrace.engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

# Above this gap exp(d) saturates: its value stays, its gradient is 0. Gradients linear in d stay at this factor.
MAX_KL_GAP = 10.0
# Beyond this a gap means "excluded by one of the two policies" and is not a number to learn from.
_MAX_DISTANCE = 1000.0

Estimator = Literal["k1", "k2", "k3", "unbiased"]


def kl_value(logprobs: Tensor, reference: Tensor, *, estimator: Estimator = "k3") -> Tensor:
    """Estimate of KL(policy || reference) at each token, detached: float [N], nats.

    k1 may be negative; k2 and k3 are not. "unbiased" is k3.
    """
    gap = _gap(logprobs.detach(), reference)
    if estimator == "k1":
        return -gap
    return _k2(gap) if estimator == "k2" else _k3(gap)


def kl_loss(logprobs: Tensor, reference: Tensor, *, estimator: Estimator, weight: Tensor | None = None) -> Tensor:
    """An estimate to add to a loss: float [N], nats, with the gradient that the module's table gives.

    Args:
        logprobs: float [N], current policy, with gradient; half precision is computed in float32.
        reference: float [N]; no gradient flows into it.
        estimator: k2, k3 or unbiased.
        weight: float [N], importance weights current / behaviour for the gradient of "unbiased"; None is 1.

    Raises:
        ConfigError: The estimator is k1, whose gradient averages to 0.
    """
    if estimator == "k1":
        raise ConfigError(
            'kl.estimator is "k1" with kl.place = "loss": its gradient averages to 0; use k2, k3 or unbiased, or set '
            'kl.place to "reward"'
        )
    gap = _gap(logprobs, reference)
    if estimator == "k2":
        return _k2(gap)
    if estimator == "k3":
        return _k3(gap)
    factor = -gap.detach().clamp(-MAX_KL_GAP, MAX_KL_GAP)
    if weight is not None:
        factor = factor * weight.detach()
    return _k3(gap.detach()) + factor * (logprobs - logprobs.detach())


def k3_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """k3 of each token: exp(d) - d - 1 with d = reference - logprobs; float [N], with its own gradient."""
    return _k3(_gap(logprobs, reference))


def _gap(logprobs: Tensor, reference: Tensor) -> Tensor:
    widest = torch.promote_types(torch.promote_types(logprobs.dtype, reference.dtype), torch.float32)
    return (reference.detach().to(widest) - logprobs.to(widest)).clamp(-_MAX_DISTANCE, _MAX_DISTANCE)


def _k2(gap: Tensor) -> Tensor:
    size = gap.abs()
    return torch.where(size <= MAX_KL_GAP, gap**2 / 2, MAX_KL_GAP * (size - MAX_KL_GAP / 2))


def _k3(gap: Tensor) -> Tensor:
    bounded = gap.clamp(max=MAX_KL_GAP)
    return torch.expm1(bounded) - bounded
