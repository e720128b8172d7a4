"""Token-level credit from a critic, on packed sequences (numpy only).

Generalised advantage estimation (arXiv 1506.02438), equation 16, computed backwards as
    delta_t = r_t + gamma * V_(t+1) - V_t,    A_t = delta_t + gamma * lambda * A_(t+1),    return_t = A_t + V_t

The decisions of an episode are its loss tokens and nothing else. In a conversation of several turns the tokens of tools
and users between them are part of the transition: the state after a turn's last token is the one before the next turn's
first token, and gamma and lambda count decisions, not tokens that somebody else wrote. So credit passes over such holes
undiminished by their length, and what stands in the columns there is never read.

The last loss token of a sequence ends its episode: the value after it is 0, also where the response was cut at its
limit, since no critic has seen what is behind the last token. Where cut responses should not count as ended, give a
penalty or a bootstrap as part of the reward.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.actors.learner.advantages.domain import at_loss_tokens, loss_positions
from headrace.engine.errors import InputError


class Gae(NamedTuple):
    """Credit and the critic's targets, float64 [N] each; 0 where the loss mask is 0."""

    advantages: npt.NDArray[np.float64]
    returns: npt.NDArray[np.float64]


def gae(
    *,
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    loss_mask: npt.ArrayLike,
    sequence_ids: npt.ArrayLike,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Gae:
    """Advantages and returns of each loss token.

    Args:
        rewards: [N], the reward of each token; see `outcome_rewards`. Rewards off the loss tokens are not read.
        values: [N], the critic's value of the state before each token, as it was when the batch was sampled.
        loss_mask: [N], not 0 on tokens that the policy sampled.
        sequence_ids: [N]; each sequence's tokens lie together.
        gamma: Discount a decision, 0 to 1.
        lam: 0 is the one-step error, 1 the whole return minus the value.

    Returns:
        float64 [N] each; all 0 if no token is a loss token.

    Raises:
        InputError: Shapes differ, a sequence's tokens do not lie together, a reward or value at a loss token is not
            finite, or gamma or lambda lies outside 0 to 1.
    """
    for name, factor in (("gamma", gamma), ("lambda", lam)):
        if not 0.0 <= factor <= 1.0:
            raise InputError(f"{name} is {factor}: it must lie between 0 and 1")
    positions = loss_positions(loss_mask, sequence_ids)
    reward = at_loss_tokens("rewards", rewards, loss_mask, positions)
    value = at_loss_tokens("values", values, loss_mask, positions)
    sequences = np.asarray(sequence_ids)[positions]
    following = np.append(value[1:], 0.0)[: value.size]
    goes_on = np.append(sequences[1:] == sequences[:-1], False)[: value.size]
    delta = reward + gamma * np.where(goes_on, following, 0.0) - value
    credit = _discounted_sums(delta, goes_on, gamma * lam)
    advantages, returns = np.zeros(np.shape(loss_mask)), np.zeros(np.shape(loss_mask))
    advantages[positions] = credit
    returns[positions] = credit + value
    return Gae(advantages, returns)


def rewards_to_go(
    *, rewards: npt.ArrayLike, loss_mask: npt.ArrayLike, sequence_ids: npt.ArrayLike, gamma: float = 1.0
) -> npt.NDArray[np.float64]:
    """The discounted sum of a token's own and all later rewards of its sequence, without a critic: float64 [N].

    It is `gae` with values of 0 and lambda 1; shapes and errors are the same.
    """
    return gae(
        rewards=rewards,
        values=np.zeros(np.shape(loss_mask)),
        loss_mask=loss_mask,
        sequence_ids=sequence_ids,
        gamma=gamma,
        lam=1.0,
    ).advantages


def outcome_rewards(
    outcomes: npt.ArrayLike, loss_mask: npt.ArrayLike, sequence_ids: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """One reward a sequence as token rewards: at its last loss token, 0 elsewhere.

    Args:
        outcomes: [N], a sequence's reward on each of its loss tokens, as `MicroBatch.advantages` carries it; what
            stands elsewhere is not read.
        loss_mask: [N].
        sequence_ids: [N].

    Returns:
        float64 [N].

    Raises:
        InputError: As in `gae`.
    """
    positions = loss_positions(loss_mask, sequence_ids)
    outcome = at_loss_tokens("outcomes", outcomes, loss_mask, positions)
    sequences = np.asarray(sequence_ids)[positions]
    is_last = np.append(sequences[1:] != sequences[:-1], True)[: positions.size]
    rewards = np.zeros(np.shape(loss_mask))
    rewards[positions[is_last]] = outcome[is_last]
    return rewards


def _discounted_sums(
    terms: npt.NDArray[np.float64], goes_on: npt.NDArray[np.bool_], factor: float
) -> npt.NDArray[np.float64]:
    """S_t = terms_t + factor * S_(t+1) where the sequence goes on."""
    total, sums = 0.0, [0.0] * terms.size
    # Plain floats: an element of an array costs ten times as much, and a batch has a hundred thousand tokens.
    for index, term, more in zip(
        range(terms.size - 1, -1, -1), reversed(terms.tolist()), reversed(goes_on.tolist()), strict=True
    ):
        total = term + (factor * total if more else 0.0)
        sums[index] = total
    return np.array(sums)
