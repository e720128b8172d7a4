# pyright: basic
# torch is only partly typed.
"""Policy gradient with a clipped, detached weight (CISPO: MiniMax-M1, arXiv 2506.13585, equations 4 and 5).

    loss of a token = -sg[ clip(r, 1 - clip_low, 1 + clip_high) ] * A * log p        r = exp(current - proximal)

The clip bounds how much a token counts and never takes its gradient away, unlike PPO's: rare tokens that begin a
reflection keep teaching after the policy has moved on them. The paper sets no lower bound (clip_low of 1 or more) and
normalises by token. Its "old" policy is the sampler; here the part from sampler to proximal policy is the importance
weight, so with one update a batch r is exactly 1 and the importance cap is the clip.
"""

from typing import TYPE_CHECKING, Any

from headrace.actors.learner.losses.contribution import LossContribution
from headrace.actors.learner.losses.policy import PolicyLossOptions, contribute, policy_tokens
from headrace.actors.learner.losses.ratios import bounded_exp

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.engine.interfaces import LossInputs
else:
    Tensor = LossInputs = Any


def cispo_loss(inputs: LossInputs, options: PolicyLossOptions) -> LossContribution:
    """The loss of one micro-batch, already divided by the step's count.

    Args:
        inputs: Tensors over N tokens.
        options: The constants; `dual_clip` is not read, as the weight is bounded on both sides.

    Returns:
        The loss and the figures of `contribute`; clipfrac counts tokens whose weight was clipped.

    Raises:
        InputError: A column is missing or has another shape than the mask.
        ConfigError: A constant of the importance weights is out of range.
    """
    tokens = policy_tokens(inputs, options)
    surrogate, clipped = clipped_weight_surrogate(tokens.current, tokens.log_ratio, tokens.advantages, options)
    return contribute(inputs, tokens, surrogate, clipped, options)


def clipped_weight_surrogate(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, options: PolicyLossOptions
) -> tuple[Tensor, Tensor]:
    """Loss of each token.

    Args:
        logprobs: float [N], current policy, with gradient.
        log_ratio: float [N], current minus proximal, nats.
        advantages: float [N].
        options: The clip range.

    Returns:
        Loss float [N], and bool [N]: where the weight was clipped.
    """
    ratio = bounded_exp(log_ratio.detach())
    weight = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    return -weight * advantages * logprobs, weight != ratio
