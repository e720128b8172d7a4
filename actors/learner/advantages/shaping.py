"""From the scorer's value to the reward that credit is assigned from (numpy only).

    shaped = scale * clip(raw, -reward_clip, reward_clip) + overlong ramp + length penalty

Clipping comes first and the penalties last, so a penalty means the same whatever the scorer's unit. Nothing is written
into the raw rewards: they stay what metrics and dynamic sampling look at. Each function is pure, so a penalty applies
once as long as the runtime calls `shape_rewards` at one place, on raw rewards, however early those were computed.
"""

import numpy as np
import numpy.typing as npt

from headrace.actors.learner.advantages.domain import finite_rewards
from headrace.engine.config.algorithm import ShapingConfig
from headrace.engine.errors import ConfigError, InputError


def check_shaping(config: ShapingConfig) -> None:
    """Refuse settings that need what is not set; to be called once, where an algorithm is made.

    Raises:
        ConfigError: A ramp or a linear penalty without a length limit, a ramp longer than the limit, or a penalty
            without its factor or a factor without its penalty.
    """
    limit = config.max_tokens
    if not limit and (config.overlong_tokens or config.length_penalty == "linear"):
        raise ConfigError(
            "algorithm.shaping counts from a response limit, but its max_tokens is 0: set it, or rollout.max_tokens"
        )
    if limit and config.overlong_tokens > limit:
        raise ConfigError(
            f"algorithm.shaping.overlong_tokens = {config.overlong_tokens} is more than the limit of {limit} tokens: "
            "it is the length of the ramp before the limit, so lower it"
        )
    if (config.length_penalty == "none") != (config.length_coef == 0):
        raise ConfigError(
            f'algorithm.shaping.length_penalty = "{config.length_penalty}" with length_coef = {config.length_coef:g} '
            'has no effect: set both, or leave length_penalty = "none" and length_coef = 0'
        )
    if (config.overlong_factor == 0) if config.overlong_tokens else (config.overlong_factor != 1):
        raise ConfigError(
            f"algorithm.shaping.overlong_factor = {config.overlong_factor:g} with overlong_tokens = "
            f"{config.overlong_tokens} has no effect: the ramp needs both its length and what it costs"
        )


def shape_rewards(raw_rewards: npt.ArrayLike, lengths: npt.ArrayLike, config: ShapingConfig) -> npt.NDArray[np.float64]:
    """The shaped rewards of one group.

    Args:
        raw_rewards: [G], the scorer's values.
        lengths: [G], response tokens.
        config: Which of the parts take place.

    Returns:
        float64 [G], always a new array.

    Raises:
        InputError: The group is empty, a reward is not finite or overflows when it is scaled, or the lengths do not fit
            the rewards.
        ConfigError: As in `check_shaping`.
    """
    check_shaping(config)
    raw = finite_rewards(raw_rewards)
    tokens = np.asarray(lengths, dtype=np.int64)
    if tokens.shape != raw.shape or bool((tokens < 0).any()):
        raise InputError(f"{tokens.size} lengths were given for {raw.size} rewards: give one a reward, none negative")
    with np.errstate(over="ignore"):
        shaped = clip_and_scale(raw, clip=config.reward_clip, scale=config.reward_scale)
    if not np.isfinite(shaped).all():
        raise InputError(
            f"a reward of {np.max(np.abs(raw)):g} with algorithm.shaping.reward_scale = {config.reward_scale:g} is "
            "more than a float holds: lower it, or set algorithm.shaping.reward_clip"
        )
    if config.overlong_tokens:
        shaped = shaped + overlong_penalty(
            tokens, max_tokens=config.max_tokens, ramp_tokens=config.overlong_tokens, factor=config.overlong_factor
        )
    if config.length_penalty == "linear":
        shaped = shaped + linear_length_penalty(tokens, max_tokens=config.max_tokens, coef=config.length_coef)
    elif config.length_penalty == "group":
        right = raw >= config.right_from
        shaped = shaped + group_length_penalty(tokens, right, coef=config.length_coef)
    return shaped


def clip_and_scale(rewards: npt.ArrayLike, *, clip: float = 0.0, scale: float = 1.0) -> npt.NDArray[np.float64]:
    """scale * clip(reward, -clip, clip), float64 [G], a new array; a clip of 0 is no clip."""
    values = np.array(rewards, dtype=np.float64)
    return scale * (np.clip(values, -clip, clip) if clip else values)


def overlong_penalty(
    lengths: npt.ArrayLike, *, max_tokens: int, ramp_tokens: int, factor: float = 1.0
) -> npt.NDArray[np.float64]:
    """Soft punishment of nearly overlong responses: DAPO (arXiv 2503.14476), equation 13, times `factor`.

    0 up to max_tokens - ramp_tokens, from there a straight line down to -factor at max_tokens, -factor beyond.

    Args:
        lengths: [G], response tokens.
        max_tokens: The limit of a response.
        ramp_tokens: Length of the ramp that ends at the limit (not where it starts), 1 to max_tokens.
        factor: The cost at the limit.

    Returns:
        float64 [G], not positive.
    """
    over = np.asarray(lengths, dtype=np.float64) - (max_tokens - ramp_tokens)
    return -factor * np.clip(over / ramp_tokens, 0.0, 1.0)


def linear_length_penalty(lengths: npt.ArrayLike, *, max_tokens: int, coef: float) -> npt.NDArray[np.float64]:
    """-coef * length / max_tokens, and -coef beyond the limit: float64 [G]; right and wrong answers cost the same."""
    return -coef * np.minimum(np.asarray(lengths, dtype=np.float64) / max_tokens, 1.0)


def group_length_penalty(lengths: npt.ArrayLike, right: npt.ArrayLike, *, coef: float) -> npt.NDArray[np.float64]:
    """Length against the others of the group: Kimi k1.5 (arXiv 2501.12599), section 2.3.3, times `coef`.

    With l = 0.5 - (length - shortest) / (longest - shortest), shortest and longest over the whole group: l for a right
    answer, min(0, l) for a wrong one, so that a short wrong answer is not rewarded for being short.

    Args:
        lengths: [G], response tokens.
        right: bool [G], which answers are right.
        coef: Factor; the penalty lies between -coef / 2 and coef / 2.

    Returns:
        float64 [G]; all 0 in a group of equal lengths.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    width = float(np.ptp(tokens))
    if not width:
        return np.zeros(tokens.shape)
    place = 0.5 - (tokens - tokens.min()) / width
    return coef * np.where(np.asarray(right, dtype=np.bool_), place, np.minimum(place, 0.0))
