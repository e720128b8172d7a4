"""Credit normalised over the whole batch: REINFORCE++ and its baseline form (numpy only).

REINFORCE++ (arXiv 2501.03262), section 3; r the shaped rewards, mean and std over all samples of the step:

    REINFORCE++:             A_i = (r_i - mean_batch(r)) / std_batch(r)
    REINFORCE++-baseline:    c_i = r_i - mean_group(r),    A_i = (c_i - mean_batch(c)) / std_batch(c)

The deviation is that of the population (it divides by the total weight), with no added epsilon. A sample weighs 1, or,
where `lengths` are given, as much as it has tokens: that is the mean over a batch's tokens, which implementations with
padded batches take. With weights of 1 a group's centred rewards sum to 0, so the baseline form's batch mean is 0 and is
not computed: a group of equal rewards then has exactly no credit. With token weights the mean is not 0, and such a
group gets the same small push for all of its members; that is what the formula says.

Groups that were filtered out beforehand (dynamic sampling) are not in the batch's statistics.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.actors.learner.advantages.domain import as_credit, finite_rewards
from headrace.actors.learner.advantages.group_relative import is_zero_variance
from headrace.actors.learner.advantages.moments import Moments, whiten
from headrace.engine.errors import InputError


def batch_normalized_advantages(
    groups: Sequence[npt.ArrayLike],
    *,
    group_baseline: bool = False,
    lengths: Sequence[npt.ArrayLike] | None = None,
) -> list[npt.NDArray[np.float32]]:
    """Credit of all samples of one step.

    Args:
        groups: The rewards [G] of each group of the step; groups may differ in size.
        group_baseline: Subtract each group's mean first.
        lengths: Response tokens [G] of each group, by which its samples are weighed; None weighs each sample 1.

    Returns:
        float32 [G] for each group, in order. Exactly 0 for all if all rewards of the batch (with `group_baseline`, of
        each group) are equal; with `group_baseline` a group of a single member is centred to 0.

    Raises:
        InputError: A group is empty, a reward is not finite, lengths do not fit the rewards or are negative, or none is
            positive.
    """
    rewards = [finite_rewards(group) for group in groups]
    if not rewards:
        return []
    weights = _weights(rewards, lengths)
    # Credit does not depend on the rewards' unit: no sum or square overflows in one in which the largest number is 1.
    values = _in_unit(np.concatenate(rewards))
    borders = np.cumsum([group.size for group in rewards])[:-1]
    if group_baseline:
        values = _in_unit(np.concatenate([_centred(group) for group in np.split(values, borders)]))
    if group_baseline and weights is None:  # the mean is 0, and its rounding error no credit
        moments = Moments(weight=values.size, spread=float(np.sum(values**2)), largest=1.0)
    else:
        moments = Moments.of(values, weights)
    credit = as_credit(whiten(values, moments))
    return np.split(credit, borders)


def _in_unit(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    largest = np.max(np.abs(values))
    return values / largest if largest else values


def _centred(rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    if is_zero_variance(rewards):
        return np.zeros_like(rewards)
    centred: npt.NDArray[np.float64] = rewards - rewards.mean()
    return centred


def _weights(
    rewards: Sequence[npt.NDArray[np.float64]], lengths: Sequence[npt.ArrayLike] | None
) -> npt.NDArray[np.float64] | None:
    if lengths is None:
        return None
    tokens = [np.asarray(group, dtype=np.float64) for group in lengths]
    if [group.shape for group in tokens] != [group.shape for group in rewards]:
        raise InputError("the lengths do not fit the rewards: give one length a reward, group by group")
    weights = np.concatenate(tokens)
    if not bool((weights >= 0).all()) or not bool((weights > 0).any()):
        raise InputError("lengths must not be negative, and one at least must be positive: they are the weights")
    return weights
