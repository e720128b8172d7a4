# pyright: basic
# torch is only partly typed.
"""On-policy distillation: the student's own samples, scored by a teacher token by token.

The aim is the reverse divergence at each state that the student visits (MiniLLM, arXiv 2306.08543, equation 1, and GKD,
arXiv 2306.13649, with the reverse KL on the student's own outputs):

    KL(student || teacher) = E_student[ log p_student(token) - log p_teacher(token) ]

Its gradient is E_student[ (log p_student - log p_teacher) * grad log p_student ]: the term in which the logarithm
itself is differentiated has expectation 0. So each token has the credit

    A_t = log p_teacher - log p_student,   detached

and the clipped policy loss with it descends the divergence. The student in A_t is the *current* policy, as the
divergence is of the one that is trained; the sampler enters through the importance weight alone. With samples that are
on-policy the gradient is exactly that of KL(student || teacher) at each state, summed over states: the estimator that
kl.py calls "unbiased". Credit is immediate, as with a discount of 0: that a token leads to later states where the two
disagree is not credited. The value of the loss is not the divergence once the ratio is clipped; the figure teacher_kl
is the estimate.

Reverse means mode-seeking: the student puts its mass where the teacher has some, and need not cover all of it.
"""

from typing import TYPE_CHECKING, Any

from headrace.actors.learner.losses.contribution import LossContribution
from headrace.actors.learner.losses.kl import MAX_KL_GAP
from headrace.actors.learner.losses.masking import check_columns, require_column, where_loss
from headrace.actors.learner.losses.policy import PolicyLossOptions, clipped_surrogate, contribute, policy_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.engine.interfaces import LossInputs
else:
    Tensor = LossInputs = Any


def distillation_loss(inputs: LossInputs, options: PolicyLossOptions) -> LossContribution:
    """The loss of one micro-batch, already divided by the step's count.

    Args:
        inputs: Tensors over N tokens with `teacher_logprobs`; `advantages` are not read.
        options: The constants of the policy loss.

    Returns:
        The loss, the figures of `contribute` and, in `sums`, teacher_kl: nats, over all loss tokens.

    Raises:
        InputError: There are no teacher log-probabilities, or a column has another shape than the mask.
        ConfigError: A constant of the importance weights is out of range.
    """
    teacher = require_column(
        inputs.teacher_logprobs,
        inputs.loss_mask,
        name="teacher_logprobs",
        reason="distillation learns from them; configure a teacher",
    )
    check_columns(inputs.loss_mask, logprobs=inputs.logprobs, teacher_logprobs=teacher)
    advantages = teacher_advantages(inputs.logprobs, teacher, inputs.loss_mask)
    tokens = policy_tokens(inputs, options, advantages=advantages)
    surrogate, clipped = clipped_surrogate(tokens.log_ratio, tokens.advantages, options)
    contribution = contribute(inputs, tokens, surrogate, clipped, options)
    contribution.sums["teacher_kl"] = -advantages.sum()
    return contribution


def teacher_advantages(logprobs: Tensor, teacher: Tensor, mask: Tensor, *, max_gap: float = MAX_KL_GAP) -> Tensor:
    """Credit of each token: teacher minus student log-probability, detached: float [N]; 0 on masked tokens.

    Args:
        logprobs: float [N], the student's, nats.
        teacher: float [N], nats; may be minus infinity where the teacher excludes a token.
        mask: bool [N].
        max_gap: Largest credit in size, so that an excluded token does not decide the step.
    """
    gap = where_loss(mask, teacher.detach()) - where_loss(mask, logprobs.detach())
    return gap.clamp(-max_gap, max_gap)
