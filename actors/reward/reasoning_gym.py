"""Scores answers to reasoning-gym tasks with the task's own scorer: `headrace.actors.reward.reasoning_gym:score`."""

import functools
import re
from importlib import import_module
from typing import Any

from headrace.engine.errors import ConfigError
from headrace.engine.types import RewardSample

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def score(sample: RewardSample) -> float:
    """The task's own score of the answer, 0 to 1.

    The answer is the content of the last `<answer>...</answer>` where there is one, else the whole response without
    white space around it.

    Args:
        sample: Its data is what `ReasoningGymSource` writes: `task`, `answer`, `metadata` and `origin`.

    Raises:
        KeyError: The data lacks one of these; the pool makes an ERROR outcome of it.
        ConfigError: reasoning-gym is not installed or does not know the task.
    """
    tags = _ANSWER_TAG.findall(sample.response_text)
    answer = (tags[-1] if tags else sample.response_text).strip()
    return float(_scorer(str(sample.data["task"])).score_answer(answer, _entry(sample)))


def _entry(sample: RewardSample) -> dict[str, Any]:
    """The entry as the task made it: made again where its origin is known, for JSON turns tuples into lists."""
    data = sample.data
    origin = data.get("origin")
    if origin is None:
        return {"question": sample.prompt_text, "answer": data["answer"], "metadata": data["metadata"]}
    options = tuple(sorted(origin["options"].items()))
    return dict(_dataset(str(data["task"]), int(origin["size"]), int(origin["seed"]), options)[int(origin["index"])])


@functools.cache
def _scorer(task: str) -> Any:
    return _create(task)


@functools.lru_cache(maxsize=8)
def _dataset(task: str, size: int, seed: int, options: tuple[tuple[str, Any], ...]) -> Any:
    return _create(task, size=size, seed=seed, **dict(options))


def _create(task: str, **options: Any) -> Any:
    try:
        reasoning_gym = import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            "the reasoning-gym scorer needs the package reasoning-gym; install headrace[examples]"
        ) from error
    try:
        return reasoning_gym.create_dataset(task, **options)
    except ValueError as error:
        raise ConfigError(f"reasoning-gym does not know the task {task!r}: {error}") from error
