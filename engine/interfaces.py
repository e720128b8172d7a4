"""The roles of a run, each a small Protocol.

For each role there are implementations that run in-process, one gRPC client that implements the same Protocol and one
servicer that exposes any implementation, so a role moves out of the process by a change of address.

Asynchronous methods that wait say so; cancelling the awaiting task withdraws the request and leaves the role usable.
"""

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from headrace.engine.types import (
    EngineState,
    GenerateRequest,
    GroupOutcome,
    MicroBatch,
    PauseMode,
    PolicyVersion,
    Prompt,
    RewardOutcome,
    RewardSample,
    StepBatch,
    StepResult,
    TokenChunk,
    TokenScores,
    TokenSequence,
    Trajectory,
    WeightAck,
    WeightUpdate,
)

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


@runtime_checkable
class InferenceBackend(Protocol):
    """Generates tokens with a policy whose version is always known."""

    async def start(self) -> None:
        """Load the model; returns when requests can be served. Called once."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream one sample; the last chunk has a finish reason. Closing the generator (`aclose`) aborts the request.

        Raises:
            WeightUpdateError: The backend serves an older version than `request.min_version`.
            UsageError: The prompt and `max_tokens` do not fit the context.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. After KEEP requests go on at `resume`; ABORT ends each with what it has (finish ABORTED)."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`. Harmless when not paused."""
        ...

    async def apply(self, update: WeightUpdate) -> WeightAck:
        """Serve the update's version, or go on serving the old one and say why. Pauses and resumes by itself.

        Never raises for a bad update: the ack's status tells.
        """
        ...

    async def state(self) -> EngineState:
        """What the backend is and does right now; does not wait."""
        ...

    async def close(self) -> None:
        """End everything that this backend started. May be called twice."""
        ...


@runtime_checkable
class Reward(Protocol):
    """Scores finished samples."""

    async def score(self, batch: Sequence[RewardSample]) -> list[RewardOutcome]:
        """One outcome a sample, in order. A scorer's failure is an outcome, not an exception."""
        ...

    async def close(self) -> None:
        """End everything that this reward started. May be called twice."""
        ...


@runtime_checkable
class TokenScorer(Protocol):
    """Scores each response token of recorded samples (reference log-probabilities, values, a teacher)."""

    async def score_tokens(self, batch: Sequence[TokenSequence]) -> list[TokenScores]:
        """One column a sequence, in order, each float32 [T]."""
        ...

    async def close(self) -> None:
        """End everything that this scorer started. May be called twice."""
        ...


@runtime_checkable
class TrainerBackend(Protocol):
    """Holds the trained weights, in the trainer's process. Synchronous: torch never runs on a loop that serves.

    With several ranks each method is collective: every rank calls it, in the same order.
    """

    def logprobs(self, micro_batch: MicroBatch) -> npt.NDArray[np.float32]:
        """Current log-probabilities, float32 [N], at each sequence's temperature; 0 where there is no score."""
        ...

    def step(self, batch: StepBatch) -> StepResult:
        """Forward, backward and update over all micro-batches; returns the version after it.

        Raises:
            NonFiniteStreakError: The configured number of steps in a row was skipped.
        """
        ...

    def export_update(self, since: PolicyVersion | None, payload_dir: Path) -> WeightUpdate:
        """Write this rank's part of the current state as an update; `since` None asks for a keyframe."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and RNG below `folder`; returns when they are on disk."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, on any number of ranks.

        Raises:
            FormatError: The folder is not a complete checkpoint.
        """
        ...

    def close(self) -> None:
        """Leave the process group. May be called twice."""
        ...


class GroupRewards(Protocol):
    """One whole group as credit assignment sees it."""

    @property
    def group_id(self) -> str: ...

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        """float64 [G], the shaped rewards."""
        ...

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """int64 [G], response tokens."""
        ...


@runtime_checkable
class Algorithm(Protocol):
    """Credit and loss of one RL method. Pure: no process group, no I/O, no global generator."""

    def assign_credit(self, groups: Sequence[GroupRewards]) -> list[npt.NDArray[np.float32]]:
        """Scalar credit on whole groups (runs on the hub, without torch): float32 [G] for each group, in order.

        Raises:
            InputError: A reward is not finite, or a group is empty.
        """
        ...

    def token_advantages(self, micro_batch: MicroBatch) -> npt.NDArray[np.float32]:
        """Token-level credit on the ranks, float32 [N]; group-relative methods spread the scalar."""
        ...

    def loss(self, inputs: "LossInputs") -> "LossOutput":
        """The part of the loss that this micro-batch contributes, already divided by the global counts."""
        ...


class LossInputs(Protocol):
    """What a loss sees of one micro-batch; tensors over N tokens, aligned with `MicroBatch`."""

    @property
    def logprobs(self) -> Tensor:
        """float32 [N], current policy, with gradient."""
        ...

    @property
    def entropy(self) -> Tensor | None:
        """float32 [N], or None when no entropy term is asked for."""
        ...

    @property
    def proximal_logprobs(self) -> Tensor:
        """float32 [N], detached; the detached current policy with one update a batch."""
        ...

    @property
    def behaviour_logprobs(self) -> Tensor:
        """float32 [N], of the sampler."""
        ...

    @property
    def reference_logprobs(self) -> Tensor | None:
        """float32 [N], or None when no KL term is asked for."""
        ...

    @property
    def advantages(self) -> Tensor:
        """float32 [N]."""
        ...

    @property
    def loss_mask(self) -> Tensor:
        """bool [N]."""
        ...

    @property
    def sequence_ids(self) -> Tensor:
        """int64 [N]."""
        ...

    @property
    def num_loss_tokens(self) -> int:
        """Loss tokens of the whole step, over all ranks and micro-batches."""
        ...

    @property
    def num_sequences(self) -> int:
        """Sequences with a loss token in the whole step."""
        ...


class LossOutput(Protocol):
    """A scalar to call `backward` on, and sums for the metrics."""

    @property
    def loss(self) -> Tensor:
        """float32 [], connected to the graph even when no token takes part."""
        ...

    @property
    def sums(self) -> dict[str, Tensor]:
        """Sums over this micro-batch's loss tokens; the trainer adds them up and divides by the global count."""
        ...

    @property
    def maxima(self) -> dict[str, Tensor]:
        """Largest values over this micro-batch's loss tokens; the trainer takes the largest over all."""
        ...


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
