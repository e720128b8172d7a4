# pyright: basic
# torch is only partly typed.
"""Direct preference optimisation (DPO, arXiv 2305.18290, equation 7).

For a pair of a chosen answer y+ and a rejected answer y- to one prompt, with the implicit reward of an answer
h(y) = beta * sum over its response tokens of (policy - reference log-probability):

    loss of a pair = -log sigmoid( h(y+) - h(y-) )

Sums, not means: a mean over tokens would be another objective, in which the length of an answer changes its reward.

Pairs are read from a packed micro-batch: `group_ids` say which two sequences belong together, and the sign of the
advantages on their loss tokens says which one was chosen (+1) and which rejected (-1). Prompt and padding carry no loss
mask and enter nowhere.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as functional

from headrace.actors.learner.losses.contribution import LossContribution
from headrace.actors.learner.losses.masking import (
    check_columns,
    require_column,
    sequence_counts,
    sequence_totals,
    where_loss,
)
from headrace.actors.learner.losses.normalization import Reduced
from headrace.engine.errors import ConfigError, InputError

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.engine.interfaces import LossInputs
else:
    Tensor = LossInputs = Any


def preference_loss(inputs: LossInputs, *, beta: float) -> LossContribution:
    """The loss of one micro-batch, already divided by the step's pairs (`num_groups`).

    Args:
        inputs: Tensors over N tokens with reference_logprobs, group_ids [S], and advantages of +1 and -1.
        beta: How strongly the reference holds; above 0.

    Returns:
        The loss and, in `sums`, over pairs: pairs, preference_loss, preference_accuracy, preference_margin,
        chosen_reward, rejected_reward. The unit of `denominator` is the pair.

    Raises:
        InputError: A column is missing or has another shape, or a group is not one chosen and one rejected answer.
        ConfigError: beta is not above 0.
    """
    if not beta > 0:
        raise ConfigError(f"algorithm.beta is {beta}: it must be above 0; 0.1 is usual")
    mask = inputs.loss_mask
    reference = require_column(
        inputs.reference_logprobs,
        mask,
        name="reference_logprobs",
        reason="DPO compares with them; configure a reference",
    )
    check_columns(
        mask,
        logprobs=inputs.logprobs,
        reference_logprobs=reference,
        advantages=inputs.advantages,
        sequence_ids=inputs.sequence_ids,
    )
    gap = where_loss(mask, inputs.logprobs) - where_loss(mask, reference.detach())
    rewards = beta * sequence_totals(gap, mask, inputs.sequence_ids)
    chosen, rejected = pair_indices(inputs.advantages, mask, inputs.sequence_ids, inputs.group_ids)
    margin = rewards[chosen] - rewards[rejected]
    losses = -functional.logsigmoid(margin)
    denominator = float(max(1, inputs.num_groups))
    # The sum over no pair is connected too: indexing keeps the graph.
    reduced = Reduced(
        loss=losses.sum() / denominator, denominator=denominator, rejected=torch.zeros((), device=mask.device)
    )
    sums = {
        "pairs": torch.ones_like(losses).sum(),
        "preference_loss": losses.sum(),
        "preference_accuracy": (margin > 0).sum(),
        "preference_margin": margin.sum(),
        "chosen_reward": rewards[chosen].sum(),
        "rejected_reward": rewards[rejected].sum(),
    }
    return LossContribution.of(reduced, sums)


def pair_indices(
    advantages: Tensor, mask: Tensor, sequence_ids: Tensor, group_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Which sequences are the chosen and the rejected answers, pair by pair.

    Sequences without a loss token are padding and belong to no pair.

    Args:
        advantages: float [N], above 0 on the loss tokens of a chosen answer, below 0 on those of a rejected one.
        mask: bool [N], loss tokens.
        sequence_ids: int64 [N].
        group_ids: int64 [S]; None where no token takes part.

    Returns:
        Two int64 [P], sequence numbers; entry p of both is pair p, in order of their group numbers.

    Raises:
        InputError: A group has not exactly one chosen and one rejected answer, or there are more sequences than
            group_ids.
    """
    count = sequence_counts(mask, sequence_ids, dtype=torch.float32)
    if group_ids is None:
        if bool(mask.any()):
            raise InputError("the micro-batch has no group_ids: DPO needs to know which two answers are a pair")
        group_ids = torch.zeros(count.numel(), dtype=torch.int64, device=mask.device)
    if count.numel() > group_ids.numel():
        raise InputError(f"{count.numel()} sequences and {group_ids.numel()} group_ids: give one a sequence")
    sign = torch.sign(sequence_totals(advantages.to(torch.float32), mask, sequence_ids))
    members = torch.nonzero(count).flatten()
    pairs = torch.unique(group_ids[members])
    sides = (members[sign[members] == wanted] for wanted in (1.0, -1.0))
    chosen, rejected = (side[torch.argsort(group_ids[side])] for side in sides)
    if not (torch.equal(group_ids[chosen], pairs) and torch.equal(group_ids[rejected], pairs)):
        raise InputError(
            f"of {pairs.numel()} groups {chosen.numel()} answers are marked as chosen and {rejected.numel()} as "
            "rejected: each group needs exactly one of each, with advantages of 1 and -1, and a loss token in both"
        )
    return chosen, rejected
