"""Which groups are worth training on, by what the scorer said (numpy only).

DAPO (arXiv 2503.14476), equation 11: 0 < number of right answers < G. A group whose answers are all right or all wrong
has no credit, and one that is replaced keeps the batch full.

The rule looks at raw rewards. Shaped ones differ nearly always (no two answers are equally long), so a rule on them
would keep groups in which every answer was wrong, and train "be short" on them. How many groups may be replaced is the
business of `headrace.engine.scheduling.refill`.
"""

import numpy.typing as npt

from headrace.actors.learner.advantages.domain import finite_rewards
from headrace.actors.learner.advantages.group_relative import is_zero_variance


def keeps_group(raw_rewards: npt.ArrayLike) -> bool:
    """Whether the raw rewards [G] of a group differ by more than float32 rounding; never for a single member.

    Raises:
        InputError: The group is empty, not one-dimensional, or a reward is not finite.
    """
    return not is_zero_variance(finite_rewards(raw_rewards))
