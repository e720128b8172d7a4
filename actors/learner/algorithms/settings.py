"""Which settings a method reads. One without effect is refused, so that no number in a configuration is idle."""

from collections.abc import Collection, Iterator

import msgspec

from headrace.actors.learner.controllers import AdaptiveKl
from headrace.engine.config import AlgorithmConfig
from headrace.engine.config.algorithm import ImportanceConfig
from headrace.engine.errors import ConfigError

# Read by the runtime, whatever the method, or filled in from the run's limits.
_ALWAYS = frozenset({"name", "skip_zero_variance", "dynamic_sampling_rounds", "length_constant", "shaping.max_tokens"})


def refuse_unread(config: AlgorithmConfig, method: str, reads: Collection[str]) -> None:
    """Refuse a setting that differs from its default and that the method does not read.

    Args:
        config: The algorithm's section.
        method: Its name, for the message.
        reads: Dotted keys below `algorithm`; a section's name stands for all of its keys.

    Raises:
        ConfigError: The first such setting, with its value and its default.
    """
    for path, value, default in _settings(config, AlgorithmConfig(), ""):
        read = path in reads or path.partition(".")[0] in reads or path in _ALWAYS
        if value != default and not read:
            raise ConfigError(
                f'algorithm.{path} = {_shown(value)} has no effect with algorithm.name = "{method}": leave it at '
                f"{_shown(default)}, or choose a method that reads it (docs/algorithms.md)"
            )


def refuse_useless_kl(config: AlgorithmConfig, method: str, *, in_reward: bool) -> None:
    """Refuse settings of the KL term that the method cannot honour.

    Args:
        config: The algorithm's section.
        method: Its name, for the message.
        in_reward: Whether its credit is by token, so that a token's KL can be part of its reward.

    Raises:
        ConfigError: Names the setting and the remedy.
    """
    kl = config.kl
    if kl.place == "reward" and not in_reward:
        raise ConfigError(
            f'algorithm.kl.place = "reward" is not possible with algorithm.name = "{method}": its credit is one number '
            'a sample, and the KL is one a token; set kl.place = "loss", or choose ppo'
        )
    if kl.place == "loss" and kl.estimator == "k1":
        raise ConfigError(
            'algorithm.kl.estimator = "k1" has no effect as a loss, its gradient averages to 0: choose "k2", "k3" or '
            '"unbiased", or ppo with kl.place = "reward"'
        )
    if kl.place == "reward" and kl.target:
        raise ConfigError(
            f"algorithm.kl.target = {_shown(kl.target)} moves the coefficient of the loss's KL term, and kl.place is "
            '"reward": set target = 0, or place = "loss"'
        )
    if kl.target and not config.kl_coef:
        raise ConfigError(
            f"algorithm.kl.target = {_shown(kl.target)} adapts algorithm.kl_coef, which is 0 and stays 0: set kl_coef "
            "to the value to begin with"
        )
    if kl.target:  # refuses what it cannot begin with, here and not when models are loaded
        AdaptiveKl(initial=config.kl_coef, target=kl.target, horizon=kl.horizon)


def refuse_useless_clip(config: AlgorithmConfig) -> None:
    """Refuse a dual clip that would bind where the ratio is 1.

    Raises:
        ConfigError: It is above 0 and not above 1.
    """
    if config.dual_clip and not config.dual_clip > 1.0:
        raise ConfigError(
            f"algorithm.dual_clip = {_shown(config.dual_clip)} would cut off tokens that have not moved: set it above "
            "1 (3 is usual), or to 0 for none"
        )


def rejection_moves_mean(importance: ImportanceConfig) -> bool:
    """Whether rules reject tokens that then leave the loss's mean, so that every token has to be looked at."""
    rejects = importance.kind == "mask" or bool(importance.reject_below or importance.reject_above)
    return rejects and not importance.fixed_denominator


def refuse_empty_rejection(config: AlgorithmConfig) -> None:
    """Refuse bounds of rejection between which no sequence lies.

    Raises:
        ConfigError: `importance.reject_above` is not 0 and not above `importance.reject_below`.
    """
    below, above = config.importance.reject_below, config.importance.reject_above
    if above and not above > below:
        raise ConfigError(
            f"algorithm.importance.reject_below = {below:g} and reject_above = {above:g} leave no sequence between "
            "them: raise reject_above, or set one of the two to 0"
        )


def refuse_constant_without_length(config: AlgorithmConfig, own_unit: str) -> None:
    """Refuse a constant-length mean of which nobody knows the length (it must not depend on the batch).

    Args:
        config: The algorithm's section.
        own_unit: What the method's loss is a mean over where `normalization` is "auto".

    Raises:
        ConfigError: `length_constant` is 0.
    """
    unit = own_unit if config.normalization == "auto" else config.normalization
    if unit == "constant" and not config.length_constant:
        raise ConfigError(
            "algorithm.length_constant = 0 leaves the constant-length mean without a length: set it to the longest "
            'response in tokens, or choose normalization = "token" or "sequence"'
        )


def _settings(config: msgspec.Struct, defaults: msgspec.Struct, prefix: str) -> Iterator[tuple[str, object, object]]:
    for name in config.__struct_fields__:
        value, default = getattr(config, name), getattr(defaults, name)
        if isinstance(value, msgspec.Struct):
            yield from _settings(value, default, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, default


def _shown(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{value}"'
        case float():
            return f"{value:g}"
        case _:
            return str(value)
