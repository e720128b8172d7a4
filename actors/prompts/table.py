"""A prompt source over rows that can be read by number: files, data sets and generated tasks alike."""

from collections.abc import Set
from typing import Any, Protocol

from headrace.actors.prompts.build import PromptFormat, build_prompt, prompt_text
from headrace.actors.prompts.position import Place, Position
from headrace.engine.errors import ConfigError
from headrace.engine.types import DropReason, GroupOutcome, Prompt


class Rows(Protocol):
    """Rows by number, always the same ones."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Row `index`, from 0. May read or generate; does not wait for anything else."""
        ...

    def where(self, index: int) -> str:
        """How to find the row, for errors."""
        ...


class TableSource:
    """Hands out the rows of a table as prompts, epoch by epoch (implements `PromptSource`).

    A prompt is handed out again after `restore` unless its end was reported before the state was taken. A group that
    was dropped because the run stopped does not count as ended.
    """

    def __init__(
        self,
        rows: Rows,
        prompt_format: PromptFormat,
        *,
        seed: int = 0,
        epochs: int = 0,
        shuffle: bool = True,
        excluded: Set[str] = frozenset(),
    ) -> None:
        """Stand at the start of the first epoch.

        Args:
            rows: What to hand out.
            prompt_format: How a row becomes a prompt.
            seed: Of the order, together with the epoch.
            epochs: How many; 0 for no end.
            shuffle: Otherwise in the order of the rows.
            excluded: Prompts with one of these texts (`prompt_text`) are left out: the held-out ones.

        Raises:
            ConfigError: There are no rows, or the first one cannot be made a prompt.
        """
        self._rows = rows
        self._format = prompt_format
        self._excluded = excluded
        self._position = Position(len(rows), seed=seed, epochs=epochs, shuffle=shuffle)
        self.num_prompts = len(rows) * epochs or None  # at most, over all epochs; None for no end
        self._build(Place(epoch=0, row=0))

    async def next(self) -> Prompt | None:
        """The next prompt, or None after the last epoch. Never waits.

        Raises:
            ConfigError: A row cannot be made a prompt, or every row is excluded.
        """
        for _ in range(len(self._rows) + 1):
            place = self._position.next()
            if place is None:
                return None
            prompt = self._build(place)
            if prompt_text(prompt) not in self._excluded:
                return prompt
            self._position.finish(place.prompt_id)
        raise ConfigError(
            f"all {len(self._rows)} prompts of the training source are held out for evaluation; "
            "raise data.size, lower eval.num_prompts or give other data"
        )

    def report(self, prompt_id: str, outcome: GroupOutcome) -> None:
        """How the group of an earlier prompt ended; unknown ids are ignored."""
        if outcome.dropped is not DropReason.STOPPED:
            self._position.finish(prompt_id)

    def state(self) -> dict[str, Any]:
        """Position and unfinished prompts, as JSON types."""
        return self._position.state()

    def restore(self, state: dict[str, Any], keep: Set[str] = frozenset()) -> None:
        """Continue from an earlier `state`: unfinished prompts first, then new ones.

        Args:
            state: From a source over the same rows with the same seed.
            keep: Ids of unfinished prompts whose samples live on in a restored buffer; not handed out again.

        Raises:
            FormatError: This is not such a state.
            ConfigError: It belongs to other data.
        """
        self._position.restore(state, keep)

    def _build(self, place: Place) -> Prompt:
        row, where = self._rows.row(place.row), self._rows.where(place.row)
        return build_prompt(row, self._format, prompt_id=place.prompt_id, where=where)


def distinct_prompts(rows: Rows, prompt_format: PromptFormat, num_prompts: int, *, seed: int | None) -> list[Prompt]:
    """The first `num_prompts` prompts with different texts, in the rows' order or, with a seed, in a fixed shuffle.

    Raises:
        ConfigError: There are fewer.
    """
    position = Position(len(rows), seed=seed or 0, epochs=1, shuffle=seed is not None)
    found: dict[str, Prompt] = {}
    while len(found) < num_prompts and (place := position.next()) is not None:
        prompt_id = f"eval-{len(found)}"
        row = rows.row(place.row)
        prompt = build_prompt(row, prompt_format, prompt_id=prompt_id, where=rows.where(place.row))
        found.setdefault(prompt_text(prompt), prompt)
    if len(found) < num_prompts:
        raise ConfigError(
            f"eval.num_prompts is {num_prompts}, but only {len(found)} different held-out prompts could be found in "
            f"{len(rows)} rows; lower it or give more data"
        )
    return list(found.values())
