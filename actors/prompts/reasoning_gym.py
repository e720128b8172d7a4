"""Generated tasks of reasoning-gym. Needs the package reasoning-gym."""

from collections.abc import Mapping, Set
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from headrace.actors.prompts.build import PromptFormat, json_types
from headrace.actors.prompts.table import TableSource
from headrace.engine.errors import ConfigError


class ReasoningGymRows:
    """The entries of one task, generated when they are asked for; the same arguments give the same entries.

    A row has the question under `prompt_key`, and `answer`, `task`, `metadata` and `origin` (how to make the entry
    again: JSON cannot hold all that some tasks put into their metadata).
    """

    def __init__(self, task: str, size: int, seed: int, options: Mapping[str, Any], prompt_key: str = "prompt") -> None:
        """Create the task.

        Args:
            task: Its name, e.g. "chain_sum".
            size: Number of entries.
            seed: Of the entries.
            options: Of the task, e.g. `{"min_digits": 1, "max_digits": 1}`.
            prompt_key: Key of the question.

        Raises:
            ConfigError: reasoning-gym is not installed, or does not know the task or an option or refuses a value.
        """
        try:
            reasoning_gym = import_module("reasoning_gym")
            tasks: list[str] = list(import_module("reasoning_gym.factory").DATASETS)
        except ImportError as error:
            raise ConfigError(
                'data.source = "reasoning_gym" needs the package reasoning-gym; headrace[examples] adds it'
            ) from error
        if task not in tasks:
            near = get_close_matches(task, tasks, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {len(tasks)} tasks, e.g. chain_sum"
            raise ConfigError(f"data.task is {task!r}, which reasoning-gym does not know; {hint}")
        try:
            self._dataset: Any = reasoning_gym.create_dataset(task, size=size, seed=seed, **options)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"reasoning-gym refuses data.options {dict(options)} for {task!r}: {error}") from error
        self._task = task
        self._size = size
        self._prompt_key = prompt_key
        self._origin = {"seed": seed, "size": size, "options": dict(options)}

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> dict[str, Any]:
        entry = self._dataset[index]
        return {
            self._prompt_key: entry["question"],
            "answer": str(entry["answer"]),
            "task": self._task,
            "metadata": _metadata(entry["metadata"], self.where(index)),
            "origin": {**self._origin, "index": index},
        }

    def where(self, index: int) -> str:
        return f"reasoning-gym {self._task} entry {index}"


class ReasoningGymSource(TableSource):
    """Prompts of one reasoning-gym task; scored by `headrace.actors.reward.reasoning_gym:score`."""

    def __init__(
        self,
        task: str,
        size: int,
        seed: int,
        options: Mapping[str, Any],
        *,
        prompt_format: PromptFormat | None = None,
        epochs: int = 0,
        excluded: Set[str] = frozenset(),
    ) -> None:
        """See `ReasoningGymRows` and `TableSource`.

        Raises:
            ConfigError: See there.
        """
        prompt_format = prompt_format or PromptFormat()
        rows = ReasoningGymRows(task, size, seed, options, prompt_format.prompt_key)
        super().__init__(rows, prompt_format, seed=seed, epochs=epochs, excluded=excluded)


def _metadata(metadata: Any, where: str) -> Any:
    try:
        return json_types({"metadata": metadata}, where)["metadata"]
    except ConfigError:  # keys that JSON cannot hold: the scorer makes the entry again from its origin
        return {"text": repr(metadata)}
