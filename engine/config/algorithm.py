"""The configuration of the RL method. Each method reads the keys that it names in its docstring.

A constant of 0 means "off" unless its comment says otherwise.
"""

from typing import Literal

from headrace.engine.config.fields import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class ImportanceConfig(Section, frozen=True, kw_only=True):
    """Correction for the difference between sampler and learner."""

    # One weight a token, the geometric mean over a sequence, or the product over it, which shrinks with its length.
    level: Literal["token", "sequence", "product"] = "token"
    kind: Literal["tis", "mask", "none"] = "tis"  # truncate at the cap, reject above it, or weight 1
    cap: PositiveFloat = 2.0
    # Whole sequences are rejected whose geometric-mean ratio lies outside; 0 is off.
    reject_below: NonNegativeFloat = 0.0
    reject_above: NonNegativeFloat = 0.0
    fixed_denominator: bool = False  # rejected tokens stay in the denominator of the loss


class KlConfig(Section, frozen=True, kw_only=True):
    """The distance to the reference policy that `algorithm.kl_coef` weighs."""

    # k1 as a loss is refused: its gradient averages to 0.
    estimator: Literal["auto", "k1", "k2", "k3", "unbiased"] = "auto"  # auto: k3 in the loss, k1 in the reward
    place: Literal["loss", "reward"] = "loss"  # never both
    target: NonNegativeFloat = 0.0  # nats a token that an adaptive coefficient steers to; 0: the coefficient is fixed
    horizon: Positive = 1000  # updates over which the adaptive coefficient changes by about a factor of e


class ShapingConfig(Section, frozen=True, kw_only=True):
    """From the scorer's value to the reward that credit is assigned from; the raw value stays apart."""

    reward_clip: NonNegativeFloat = 0.0  # raw rewards are clipped to plus and minus this much first; 0: off
    reward_scale: PositiveFloat = 1.0
    overlong_tokens: NonNegative = 0  # the last so many tokens before the limit cost; 0: no ramp
    overlong_factor: NonNegativeFloat = 1.0  # what a response at the limit costs
    length_penalty: Literal["none", "linear", "group"] = "none"
    length_coef: NonNegativeFloat = 0.0
    right_from: float = 1.0  # raw rewards of at least this much are right answers, to the group penalty
    max_tokens: NonNegative = 0  # the limit; 0: rollout.max_tokens


class GaeConfig(Section, frozen=True, kw_only=True):
    """Token-level credit from a critic."""

    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    value_clip: NonNegativeFloat = 0.2  # range of the clipped value loss; 0: not clipped


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    """The RL method."""

    name: str = "grpo"  # an entry point of headrace.algorithms, or module:Class
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.28
    sequence_clip_low: NonNegativeFloat = 3e-4  # gspo's range: the mean of a sequence moves less than a token
    sequence_clip_high: NonNegativeFloat = 4e-4
    dual_clip: NonNegativeFloat = 0.0  # most that a token may cost, in multiples of a negative advantage; above 1
    normalize_std: bool = True  # divide centred rewards by the group's sample deviation
    # The loss's mean: over tokens, over sequences, or over a constant length; auto is the method's own.
    normalization: Literal["auto", "token", "sequence", "constant"] = "auto"
    length_constant: NonNegative = 0  # tokens, of "constant"; 0: rollout.max_tokens
    kl_coef: NonNegativeFloat = 0.0
    entropy_coef: NonNegativeFloat = 0.0
    skip_zero_variance: bool = True  # groups whose rewards are all equal take no forward pass
    dynamic_sampling: Literal["auto", "on", "off"] = "auto"  # replace groups whose raw rewards are all equal
    dynamic_sampling_rounds: Positive = 10  # steps' worth of groups that may be replaced in a row before the run ends
    beta: PositiveFloat = 0.1  # dpo
    importance: ImportanceConfig = ImportanceConfig()
    kl: KlConfig = KlConfig()
    shaping: ShapingConfig = ShapingConfig()
    gae: GaeConfig = GaeConfig()
