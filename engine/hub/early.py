"""What can be told before anything is started: names that do not exist, prompts that cannot last.

A child would find the same out after its imports, and a user would wait for a model to load to hear of a typing error.
"""

from typing import Any, cast

from headrace.engine.config import Config
from headrace.engine.config.resolve import algorithm_config
from headrace.engine.errors import ConfigError
from headrace.engine.interfaces import Algorithm, PromptSource
from headrace.engine.plugins import load_entry_point, load_object


def check_names(config: Config) -> None:
    """Look for the model and the reward function without loading either; what cannot be told cheaply passes.

    Blocks for a few file system calls. Roles that are started by others may live on another host: what only they need
    is not looked for.

    Raises:
        ConfigError: There is no such model or module.
    """
    samples_here = config.rollout.launch == "engine" and config.rollout.backend != "scripted"
    if samples_here or config.learner.launch == "engine":
        cast(Any, load_object("headrace.actors.models:check_model"))(config.model.path)
    if config.reward.function:
        cast(Any, load_object("headrace.actors.reward.function:check_scoring_function"))(config.reward.function)


# What the learner adds to a micro-batch by itself.
_COLUMNS_THERE = frozenset({"reference_logprobs"})


def load_algorithm(config: Config) -> Algorithm:
    """The method that a run applies, made from its settings. Imports its module, which needs no torch.

    Raises:
        UsageError: There is no such method.
        ConfigError: A setting has no effect with it or cannot be honoured, or it cannot learn in a run.
    """
    make = cast(Any, load_entry_point("headrace.algorithms", config.algorithm.name))
    algorithm = cast(Algorithm, make(algorithm_config(config)))
    check_algorithm_runs(config, algorithm)
    return algorithm


def check_algorithm_runs(config: Config, algorithm: Algorithm) -> None:
    """A method may need what no part of a run produces yet; its functions can be called from other loops all the same.

    Raises:
        ConfigError: The method cannot learn in this run; names the setting and what to use instead.
    """
    name, traits = config.algorithm.name, algorithm.traits
    if traits.trains_on != "rollouts":
        raise ConfigError(
            f'algorithm.name = "{name}" trains on {traits.trains_on.replace("_", " ")}, and a run trains on what it '
            "samples: choose another method, or call its loss from a loop of your own (docs/algorithms.md)"
        )
    missing = [column for column in traits.columns if column not in _COLUMNS_THERE]
    if missing:
        raise ConfigError(
            f'algorithm.name = "{name}" needs {missing[0].replace("_", " ")}, which no part of a run produces yet: '
            "choose another method, or call its functions from a loop of your own (docs/algorithms.md)"
        )
    size = config.schedule.group_size
    if size < traits.min_group_size:
        raise ConfigError(
            f'schedule.group_size = {size} with algorithm.name = "{name}" can never learn: the method compares samples '
            f"of one prompt with each other; set group_size to at least {traits.min_group_size} or choose another "
            "algorithm"
        )


def check_prompts_last(config: Config, source: PromptSource) -> None:
    """Steps for which there will never be prompts would be found out after everything before them was trained.

    Raises:
        ConfigError: The source knows its number of prompts, and the steps need more.
    """
    there: int | None = getattr(source, "num_prompts", None)
    steps, per_step = config.run.steps, config.schedule.groups_per_step
    if there is None or there >= steps * per_step:
        return
    raise ConfigError(
        f"run.steps = {steps} with schedule.groups_per_step = {per_step} needs {steps * per_step} prompts, but "
        f"data.epochs = {config.data.epochs} gives {there}; set data.epochs = 0 to repeat them, or run.steps to at "
        f"most {there // per_step}"
    )
