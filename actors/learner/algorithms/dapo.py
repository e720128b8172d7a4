"""DAPO: GRPO with a wider upper clip, a token mean, full batches and soft length limits (arXiv 2503.14476).

What it adds to GRPO, each by a setting that the other methods have as well:

    clip-higher (equation 10)                 clip_low 0.2, clip_high 0.28
    dynamic sampling (equation 11)            groups of equal raw rewards are replaced, unless it is "off"
    token-level loss (equation 8)             the mean over all tokens of the step
    soft overlong punishment (equation 13)    `shaping.overlong_tokens`: the ramp before the limit; off unless given,
                                              the paper takes a fifth of the limit

The paper has no KL term: `kl_coef` is 0 by default.
"""

from headrace.actors.learner.algorithms.grpo import Grpo


class Dapo(Grpo):
    """GRPO's credit and token mean, on groups that have something to teach."""

    name = "dapo"
    replaces_groups = True
