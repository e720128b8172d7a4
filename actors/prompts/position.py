"""Where a source stands in its prompts: a pure state machine without rows, files or clock.

Invariants:
- The order of an epoch depends on (seed, epoch, number of rows) alone.
- A prompt is identified by its epoch and row, so the same row in two epochs is two prompts.
- What was handed out and not reported is unfinished. `state` holds position and unfinished prompts, so that a restored
  position hands out each prompt of an epoch exactly once more or not at all, never both.
- Unfinished prompts come first after `restore`, in the order in which they were handed out before.
"""

from collections import deque
from collections.abc import Set
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engine.errors import ConfigError, FormatError


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: a row in an epoch."""

    epoch: int
    row: int

    @property
    def prompt_id(self) -> str:
        return f"{self.epoch}-{self.row}"


class _State(msgspec.Struct, frozen=True, kw_only=True):
    num_rows: int
    seed: int
    epoch: int
    position: int
    unfinished: list[tuple[int, int]]


class Position:
    """Hands out places epoch by epoch, each epoch in an order of its own."""

    def __init__(self, num_rows: int, *, seed: int, epochs: int, shuffle: bool = True) -> None:
        """Stand at the start.

        Args:
            num_rows: Rows of an epoch.
            seed: Of the orders.
            epochs: How many; 0 for no end.
            shuffle: Otherwise each epoch is in the order of the rows.

        Raises:
            ConfigError: There are no rows.
        """
        if num_rows < 1:
            raise ConfigError("the prompt source has no rows; give it at least one")
        self._num_rows = num_rows
        self._seed = seed
        self._epochs = epochs
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._again: deque[Place] = deque()
        self._unfinished: dict[str, Place] = {}
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """Of the next new place, from 0."""
        return self._epoch

    @property
    def unfinished(self) -> list[str]:
        """Ids that were handed out and not reported, oldest first."""
        return list(self._unfinished)

    def next(self) -> Place | None:
        """The next place, which is unfinished from now on; None after the last epoch."""
        if self._again:
            return self._again.popleft()
        if self._position == self._num_rows:
            self._epoch += 1
            self._position = 0
            self._order = self._order_of(self._epoch)
        if self._epochs and self._epoch >= self._epochs:
            return None
        place = Place(epoch=self._epoch, row=int(self._order[self._position]))
        self._position += 1
        self._unfinished[place.prompt_id] = place
        return place

    def finish(self, prompt_id: str) -> bool:
        """The prompt needs no second try; False where it was not unfinished."""
        return self._unfinished.pop(prompt_id, None) is not None

    def state(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        state = _State(
            num_rows=self._num_rows,
            seed=self._seed,
            epoch=self._epoch,
            position=self._position,
            unfinished=[(place.epoch, place.row) for place in self._unfinished.values()],
        )
        return {str(key): value for key, value in msgspec.to_builtins(state).items()}

    def restore(self, state: dict[str, Any], keep: Set[str] = frozenset()) -> None:
        """Continue from a `state`.

        Args:
            state: Of a position over the same rows with the same seed.
            keep: Unfinished prompts that live on elsewhere (in a restored buffer): not handed out again.

        Raises:
            FormatError: This is not a state of `Position`.
            ConfigError: It belongs to another number of rows or another seed; nothing has changed then.
        """
        try:
            known = msgspec.convert(state, type=_State)
        except msgspec.ValidationError as error:
            raise FormatError(f"the saved state of the prompt source cannot be read: {error}") from error
        if (known.num_rows, known.seed) != (self._num_rows, self._seed):
            raise ConfigError(
                f"the saved prompt position is of {known.num_rows} rows with data.seed {known.seed}, the source has "
                f"{self._num_rows} rows with data.seed {self._seed}; resume with the same data or start a new run"
            )
        rows = [row for _, row in known.unfinished]
        if not 0 <= known.position <= self._num_rows or any(not 0 <= row < self._num_rows for row in rows):
            raise FormatError("the saved state of the prompt source names rows that do not exist")
        places = [Place(epoch=epoch, row=row) for epoch, row in known.unfinished]
        self._epoch, self._position = known.epoch, known.position
        self._order = self._order_of(known.epoch)
        self._unfinished = {place.prompt_id: place for place in places}
        self._again = deque(place for place in places if place.prompt_id not in keep)

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self._num_rows)
        return np.random.default_rng([self._seed, epoch]).permutation(self._num_rows)
