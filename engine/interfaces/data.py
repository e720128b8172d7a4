"""The roles that choose what is sampled and what is trained on."""

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from headrace.engine.types import GroupOutcome, PolicyVersion, Prompt, Trajectory


@runtime_checkable
class Sampler(Protocol):
    """Chooses items of a table. Pure: the generator is passed in."""

    def select(self, view: "TableView", n: int, version: PolicyVersion, rng: np.random.Generator) -> list[int]:
        """Positions in `view` of up to n distinct items, in the order they should be taken."""
        ...


class TableView(Protocol):
    """The ready items of a table as parallel arrays, in insertion order."""

    @property
    def oldest_versions(self) -> npt.NDArray[np.int64]:
        """int64 [M], version counter of each item's oldest token."""
        ...

    @property
    def inserted(self) -> npt.NDArray[np.int64]:
        """int64 [M], insertion sequence number."""
        ...

    @property
    def priorities(self) -> npt.NDArray[np.float64]:
        """float64 [M]."""
        ...


@runtime_checkable
class PromptSource(Protocol):
    """Where prompts come from. Not shared between tasks."""

    async def next(self) -> Prompt | None:
        """The next prompt, or None when there are no more. May wait for a client to push one."""
        ...

    def report(self, prompt_id: str, outcome: GroupOutcome) -> None:
        """How the group of an earlier prompt ended; a curriculum may use it."""
        ...

    def state(self) -> dict[str, Any]:
        """Position, as JSON types: enough for `restore` to neither lose nor repeat a prompt."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from an earlier `state`."""
        ...


@runtime_checkable
class Environment(Protocol):
    """A multi-turn conversation: the policy acts, the environment answers."""

    async def reset(self, prompt: Prompt) -> Prompt:
        """The first observation, as a prompt to render."""
        ...

    async def step(self, trajectory: Trajectory) -> "EnvironmentStep":
        """Answer the policy's last turn."""
        ...

    async def close(self) -> None:
        """May be called twice."""
        ...


class EnvironmentStep(Protocol):
    """What the environment says after a turn."""

    @property
    def observation_token_ids(self) -> npt.NDArray[np.int32]:
        """int32 [K], appended to the ids so far and masked out of the loss; empty when done."""
        ...

    @property
    def done(self) -> bool: ...
