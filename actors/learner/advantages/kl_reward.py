"""The distance to the reference policy as a reward of each token (numpy only).

Ziegler et al. (arXiv 1909.08593), equation 2, token by token, with the outcome r at the last token T:

    r_t = -beta * (log pi(t) - log pi_ref(t)) + [t = T] * r

Drifting away from the reference lowers the reward. With this the loss has no KL term: the distance enters once.

As a reward k1 is the estimator whose policy gradient is that of the true KL: it has the score function in front, which
gives exactly what k1 lacks as a loss. So "auto" and "unbiased" are k1 here. k2 and k3 vary less, but their gradient is
not that of the KL: what the score function leaves out, their own derivative, is not 0 on average.

The policy is the one that sampled (behaviour): a reward is a number, no gradient passes through it.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from headrace.actors.learner.advantages.domain import at_loss_tokens, loss_positions
from headrace.actors.learner.advantages.gae import outcome_rewards
from headrace.engine.errors import InputError

Estimator = Literal["auto", "k1", "k2", "k3", "unbiased"]  # as `algorithm.kl.estimator`

# exp(10) = 22026: above this gap k3 saturates, so that one token cannot drown a batch.
MAX_KL_GAP = 10.0


def kl_penalties(
    *,
    logprobs: npt.ArrayLike,
    reference_logprobs: npt.ArrayLike,
    loss_mask: npt.ArrayLike,
    sequence_ids: npt.ArrayLike,
    kl_coef: float,
    estimator: Estimator = "auto",
) -> npt.NDArray[np.float64]:
    """-kl_coef * KL estimate of each loss token: float64 [N], 0 elsewhere.

    Args:
        logprobs: [N], of the policy that sampled, in nats; d below is logprobs - reference_logprobs.
        reference_logprobs: [N], in nats, at the same temperature.
        loss_mask: [N].
        sequence_ids: [N].
        kl_coef: beta, not negative.
        estimator: "k1", "auto" and "unbiased" are d, "k2" is d^2 / 2, "k3" is exp(-d) - 1 + d with d bounded below by
            -`MAX_KL_GAP`.

    Raises:
        InputError: Shapes differ, a log-probability at a loss token is not finite, or the coefficient is negative or
            not finite.
    """
    if not 0.0 <= kl_coef < np.inf:
        raise InputError(
            f"kl_coef is {kl_coef}: it must be finite and not negative, or the policy is paid for drifting"
        )
    positions = loss_positions(loss_mask, sequence_ids)
    policy = at_loss_tokens("log-probabilities", logprobs, loss_mask, positions)
    gap = policy - at_loss_tokens("reference log-probabilities", reference_logprobs, loss_mask, positions)
    if estimator == "k2":
        distance = 0.5 * gap**2
    elif estimator == "k3":
        bounded = np.maximum(gap, -MAX_KL_GAP)
        distance = np.expm1(-bounded) + bounded
    else:
        distance = gap
    penalties = np.zeros(np.shape(loss_mask))
    penalties[positions] = -kl_coef * distance
    return penalties


def kl_shaped_rewards(
    *,
    outcomes: npt.ArrayLike,
    logprobs: npt.ArrayLike,
    reference_logprobs: npt.ArrayLike,
    loss_mask: npt.ArrayLike,
    sequence_ids: npt.ArrayLike,
    kl_coef: float,
    estimator: Estimator = "auto",
) -> npt.NDArray[np.float64]:
    """Token rewards with the KL in them: `kl_penalties`, plus each sequence's outcome at its last loss token.

    Args:
        outcomes: [N], as in `outcome_rewards`.
        logprobs, reference_logprobs, loss_mask, sequence_ids, kl_coef, estimator: As in `kl_penalties`.

    Returns:
        float64 [N], to be handed to `gae` or `rewards_to_go`.

    Raises:
        InputError: As in `kl_penalties`, or an outcome at a loss token is not finite.
    """
    penalties = kl_penalties(
        logprobs=logprobs,
        reference_logprobs=reference_logprobs,
        loss_mask=loss_mask,
        sequence_ids=sequence_ids,
        kl_coef=kl_coef,
        estimator=estimator,
    )
    return penalties + outcome_rewards(outcomes, loss_mask, sequence_ids)
