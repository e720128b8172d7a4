"""Group-relative credit: each sample against the others of its prompt (numpy only).

DeepSeekMath (arXiv 2402.03300), section 4.1.2: A_i = (r_i - mean(r)) / std(r), with the sample deviation (ddof = 1).
Without the division this is the credit of Dr. GRPO (arXiv 2503.20783).
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from headrace.actors.learner.advantages.domain import as_credit, finite_rewards
from headrace.engine.errors import InputError

# Rewards that differ by less than this part of the largest one are equal: that is a float32 scorer's rounding.
_EQUAL = float(np.finfo(np.float32).eps)


def is_zero_variance(rewards: npt.ArrayLike) -> bool:
    """Whether a group teaches nothing: all rewards [G] are equal up to float32 rounding, or there is one member only.

    Rewards are compared with each other, not with their mean: the mean of seven equal values need not be that value,
    and dividing its rounding error by a deviation of the same size would push the whole group in one direction.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.size < 2:
        return True
    with np.errstate(over="ignore"):  # an infinite distance is above 0 too
        return bool(np.ptp(values) <= _EQUAL * np.max(np.abs(values)))


def group_relative_advantages(rewards: npt.ArrayLike, *, normalize_std: bool = True) -> npt.NDArray[np.float32]:
    """Credit of the members of one group.

    Args:
        rewards: [G], in any order.
        normalize_std: Divide the centred rewards by the sample deviation (ddof = 1); there is no added epsilon.

    Returns:
        float32 [G]; exactly 0 for a group of zero variance or of a single member.

    Raises:
        InputError: The group is empty, not one-dimensional, or a reward is not finite or too large for its credit.
    """
    values = finite_rewards(rewards)
    if is_zero_variance(values):
        return np.zeros(values.size, dtype=np.float32)
    # Scaled first, so that neither the mean nor the squares of huge rewards overflow.
    scale = np.max(np.abs(values)) if normalize_std else 1.0
    centred = values / scale
    with np.errstate(over="ignore"):  # as_credit tells
        centred -= centred.mean()
    if normalize_std:
        centred /= np.sqrt(np.sum(centred**2) / (values.size - 1))
    return as_credit(centred)


def group_relative_by_id(
    group_ids: Sequence[str], rewards: npt.ArrayLike, *, normalize_std: bool = True
) -> npt.NDArray[np.float32]:
    """Credit of rows that arrive in any order; rows belong together by id, never by position or by prompt text.

    Args:
        group_ids: [N], the group of each row.
        rewards: [N].
        normalize_std: As in `group_relative_advantages`.

    Returns:
        float32 [N], in row order.

    Raises:
        InputError: The lengths differ, or a reward is not finite.
    """
    return credit_by_id(group_ids, rewards, partial(group_relative_advantages, normalize_std=normalize_std))


def credit_by_id(
    group_ids: Sequence[str],
    rewards: npt.ArrayLike,
    credit: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float32]],
) -> npt.NDArray[np.float32]:
    """Any credit of one group, for rows that arrive in any order.

    Args:
        group_ids: [N], the group of each row.
        rewards: [N].
        credit: From the rewards [G] of one group, in row order, to its credit float32 [G]; e.g. `rloo_advantages`.

    Returns:
        float32 [N], in row order.

    Raises:
        InputError: The lengths differ, or `credit` refuses a group.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.shape != (len(group_ids),):
        raise InputError(f"{len(group_ids)} group ids and rewards of shape {values.shape}: give one reward an id")
    rows: dict[str, list[int]] = {}
    for row, group_id in enumerate(group_ids):
        rows.setdefault(group_id, []).append(row)
    advantages = np.zeros(len(group_ids), dtype=np.float32)
    for members in rows.values():
        advantages[members] = credit(values[members])
    return advantages
