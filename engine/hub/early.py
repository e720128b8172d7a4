"""What can be told before anything is started: names that do not exist, prompts that cannot last.

A child would find the same out after its imports, and a user would wait for a model to load to hear of a typing error.
"""

from typing import Any, cast

from headrace.engine.config import Config
from headrace.engine.errors import ConfigError
from headrace.engine.interfaces import PromptSource
from headrace.engine.plugins import load_object


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
