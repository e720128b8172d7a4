# pyright: basic
# torch is only partly typed.
"""Negative log-likelihood of demonstrations (supervised fine-tuning).

    loss of a token = -log p(token | tokens before it)

As a mean over the step's loss tokens this is the usual cross entropy, as in the first step of InstructGPT (arXiv
2203.02155, section 3.1). Nothing else enters, neither advantages nor a sampler.
"""

from typing import TYPE_CHECKING, Any

from headrace.actors.learner.losses.contribution import LossContribution
from headrace.actors.learner.losses.masking import check_columns, where_loss
from headrace.actors.learner.losses.normalization import Normalization, normalize_tokens

if TYPE_CHECKING:
    from headrace.engine.interfaces import LossInputs
else:
    LossInputs = Any

_TOKEN_MEAN = Normalization()


def supervised_loss(inputs: LossInputs, normalization: Normalization = _TOKEN_MEAN) -> LossContribution:
    """The loss of one micro-batch, already divided by the step's count.

    Args:
        inputs: Reads logprobs, loss_mask, sequence_ids and the counts of the step.
        normalization: What the loss is a mean over.

    Returns:
        The loss and, in `sums`: nll, nats.

    Raises:
        InputError: A column has another shape than the mask.
    """
    mask = inputs.loss_mask
    check_columns(mask, logprobs=inputs.logprobs, sequence_ids=inputs.sequence_ids)
    nll = -where_loss(mask, inputs.logprobs)
    reduced = normalize_tokens(
        nll,
        mask,
        inputs.sequence_ids,
        normalization=normalization,
        num_loss_tokens=inputs.num_loss_tokens,
        num_sequences=inputs.num_sequences,
    )
    return LossContribution.of(reduced, {"nll": nll.sum()})
