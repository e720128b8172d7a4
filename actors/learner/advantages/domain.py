"""What the credit functions take and give: finite rewards of whole groups, finite numbers on loss tokens."""

import numpy as np
import numpy.typing as npt

from headrace.engine.errors import InputError


def finite_rewards(rewards: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The rewards of one group as float64 [G]; may share memory with what was given, so never write into it.

    Raises:
        InputError: The group is empty, not one-dimensional, or a reward is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise InputError(f"rewards have the shape {values.shape}: a group needs one dimension and at least one member")
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InputError(
            f"the reward of member {bad} is {values[bad]}: rewards must be finite; drop or requeue the group"
        )
    return values


def as_credit(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Credit as it travels, float32 of the same shape.

    Raises:
        InputError: A value is too large for float32.
    """
    with np.errstate(over="ignore"):
        credit = values.astype(np.float32)
    if not np.isfinite(credit).all():
        worst = float(np.max(np.abs(values)))
        raise InputError(
            f"credit of {worst:g} does not fit into float32: lower algorithm.shaping.reward_scale, "
            "set algorithm.shaping.reward_clip, or normalise the rewards"
        )
    return credit


def loss_positions(loss_mask: npt.ArrayLike, sequence_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Where the loss tokens of packed sequences stand: int64 [M], ascending.

    Args:
        loss_mask: [N], not 0 on tokens that the policy sampled.
        sequence_ids: [N], the sequence of each token; any numbers, as long as each sequence's tokens lie together.

    Raises:
        InputError: The shapes differ, or the tokens of a sequence do not lie together.
    """
    mask, ids = np.asarray(loss_mask), np.asarray(sequence_ids)
    if mask.ndim != 1 or mask.shape != ids.shape:
        raise InputError(
            f"the loss mask has the shape {mask.shape} and the sequence ids {ids.shape}: give one of each a token, [N]"
        )
    starts = ids[np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))] if ids.size else ids
    if np.unique(starts).size != starts.size:
        raise InputError("the tokens of a sequence do not lie together: lay whole sequences end to end")
    return np.flatnonzero(mask != 0)


def at_loss_tokens(
    name: str, column: npt.ArrayLike, loss_mask: npt.ArrayLike, positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """A column's values at the loss tokens, float64 [M]; what stands elsewhere is never read, so it may be NaN.

    Args:
        name: What the column is called in an error.
        column: [N].
        loss_mask: [N].
        positions: int64 [M], of `loss_positions`.

    Raises:
        InputError: The column has another shape than the mask, or is not finite at a loss token.
    """
    values, mask = np.asarray(column), np.asarray(loss_mask)
    if values.shape != mask.shape:
        raise InputError(f"{name} have the shape {values.shape}: one number a token is needed, {mask.shape}")
    picked = values[positions].astype(np.float64)
    if not np.isfinite(picked).all():
        bad = int(np.flatnonzero(~np.isfinite(picked))[0])
        raise InputError(f"{name} at token {int(positions[bad])} are {picked[bad]}: loss tokens need finite numbers")
    return picked
