# pyright: basic
# torch is only partly typed.
"""Sequence-level clipped policy loss (GSPO, arXiv 2507.18071).

Equation 7: the ratio of a sequence is the geometric mean of its tokens' ratios,

    s_i = exp( sum_t (current - proximal) / |y_i| )

and equations 13 and 14 (the token form) give it to each token with a gradient that flows through that token alone:

    s_it = sg[s_i] * p_t / sg[p_t]        p_t: probability of the token, sg: no gradient

Its value is s_i everywhere, so clip and clip fraction are of whole sequences. With credit that is constant over a
sequence and the sequence mean the gradient is exactly that of equation 5; with credit of tokens it is the token form.

With one update a batch s_i is exactly 1 and the clip cannot bite; the importance weight is what corrects. The clip
range is of a mean over a sequence, so it has to be much narrower than that of a token: 3e-4 and 4e-4 in the paper.
"""

from typing import TYPE_CHECKING, Any

from headrace.actors.learner.losses.contribution import LossContribution
from headrace.actors.learner.losses.masking import sequence_mean
from headrace.actors.learner.losses.policy import PolicyLossOptions, clipped_surrogate, contribute, policy_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.engine.interfaces import LossInputs
else:
    Tensor = LossInputs = Any


def gspo_loss(inputs: LossInputs, options: PolicyLossOptions) -> LossContribution:
    """The loss of one micro-batch, already divided by the step's count.

    Args:
        inputs: Tensors over N tokens; sequences are whole.
        options: The constants; the paper normalises by "sequence".

    Returns:
        The loss and the figures of `contribute`; clipfrac counts the tokens of clipped sequences.

    Raises:
        InputError: A column is missing or has another shape than the mask.
        ConfigError: A constant of the importance weights is out of range.
    """
    tokens = policy_tokens(inputs, options)
    log_ratio = sequence_log_ratio(tokens.current, tokens.log_ratio, inputs.loss_mask, inputs.sequence_ids)
    surrogate, clipped = clipped_surrogate(log_ratio, tokens.advantages, options)
    return contribute(inputs, tokens, surrogate, clipped, options)


def sequence_log_ratio(logprobs: Tensor, log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """log s_it: the mean log-ratio of the sequence, with the gradient of the token's own log-probability.

    Args:
        logprobs: float [N], current policy, with gradient; finite also where masked.
        log_ratio: float [N], current minus proximal, nats.
        mask: bool [N], loss tokens; others are in no mean.
        sequence_ids: int64 [N].

    Returns:
        float [N].
    """
    mean = sequence_mean(log_ratio.detach(), mask, sequence_ids)
    return mean + (logprobs - logprobs.detach())
