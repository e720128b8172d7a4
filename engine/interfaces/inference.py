"""The roles that sample and score."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol, runtime_checkable

from headrace.engine.types import (
    EngineState,
    GenerateRequest,
    PauseMode,
    RewardOutcome,
    RewardSample,
    TokenChunk,
    TokenScores,
    TokenSequence,
    WeightAck,
    WeightUpdate,
)


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

        A delta comes as a change file (`weights/change_update.py`); a backend may refuse all of them. Never raises for
        a bad update: the ack's status tells. FAILED with the digest 0 says that nothing is served until a full update
        succeeds.
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
