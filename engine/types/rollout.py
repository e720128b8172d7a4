"""Prompts, generation and what comes out of it."""

import enum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engine.types.policy import PolicyVersion, VersionSpan


class FinishReason(enum.IntEnum):
    """Why a sample ended; the numbers are those of the wire."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORTED = 3


class PauseMode(enum.IntEnum):
    """What a pause does to requests in flight."""

    KEEP = 1
    ABORT = 2


class DropReason(enum.StrEnum):
    """Why a group left without being trained on."""

    STALE = "stale"
    REWARD_FAILED = "reward_failed"
    ROLLOUT_FAILED = "rollout_failed"
    PROMPT_TOO_LONG = "prompt_too_long"
    ZERO_VARIANCE = "zero_variance"
    INCARNATION_LOST = "incarnation_lost"
    STOPPED = "stopped"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One chat turn."""

    role: str
    content: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. Log-probabilities are those of the distribution at this temperature.

    Attributes:
        temperature: Logits are divided by it; 0 is greedy.
        top_p: Nucleus; 1.0 is off. Anything else makes the sampler's distribution differ from the learner's.
        top_k: 0 is off.
        max_tokens: Most response tokens.
        stop: Strings that end the response; their tokens stay in it.
        stop_token_ids: Tokens that end the response, besides the model's own end token.
        seed: Makes the sample reproducible on the same backend.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy is asked. Exactly one of `messages`, `text` and `token_ids` is filled in.

    Attributes:
        prompt_id: Stable over restarts; unique within its source and epoch.
        data: What a reward needs (the reference answer, ...); JSON types only.
    """

    prompt_id: str
    messages: tuple[Message, ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()
    data: dict[str, Any] = {}


class PromptGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt sampled `group_size` times; the unit of admission, leasing and credit.

    Attributes:
        attempt: 0 for the first try; a requeue is a new attempt at the same group.
        min_version: An engine that serves an older version must not run this group.
        table: The table that receives the records.
    """

    group_id: str
    prompt: Prompt
    group_size: int
    attempt: int = 0
    min_version: PolicyVersion = PolicyVersion(0, 0)
    sampling: SamplingParams = SamplingParams()
    table: str = "train"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to generate.

    Attributes:
        token_ids: The prompt, rendered once; training sees these very ids.
        min_version: The backend answers with WeightUpdateError if it serves an older version.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    min_version: PolicyVersion = PolicyVersion(0, 0)


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive tokens of one response, all from one version.

    Attributes:
        token_ids: Sampled ids; may be empty in the last chunk.
        logprobs: As many as token_ids; of the distribution that the token was drawn from, in nats.
        finish_reason: NONE until the last chunk.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: PolicyVersion
    finish_reason: FinishReason = FinishReason.NONE


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """What an inference backend is and does right now."""

    model: str
    backend: str
    policy_version: PolicyVersion
    num_running: int = 0
    num_waiting: int = 0
    max_context_tokens: int = 0
    num_tokens: int = 0


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One finished sample, as the producer knows it; later columns are sidecars.

    Attributes:
        record_id: `{group_id}/{sample_index}/{attempt}`.
        prompt_token_ids: int32 [P].
        response_token_ids: int32 [T].
        logprobs: float32 [T]; behaviour log-probabilities in nats at the sampling temperature. 0 where loss_mask is 0.
        loss_mask: uint8 [T]; 1 for tokens that the policy sampled.
        spans: Versions of the response tokens in order; token counts sum to T.
        prompt_text, response_text: For rewards and for people; training uses the ids alone.
        data: The prompt's data.
        started_at_s, finished_at_s: Unix time.
    """

    record_id: str
    group_id: str
    prompt_id: str
    sample_index: int
    group_size: int
    attempt: int
    prompt_token_ids: npt.NDArray[np.int32]
    response_token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    loss_mask: npt.NDArray[np.uint8]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    temperature: float
    prompt_text: str = ""
    response_text: str = ""
    data: dict[str, Any] = {}
    started_at_s: float = 0.0
    finished_at_s: float = 0.0

    @property
    def oldest_version(self) -> PolicyVersion:
        """The smallest version among the response tokens."""
        return min(span.version for span in self.spans)

    @property
    def newest_version(self) -> PolicyVersion:
        """The largest version among the response tokens."""
        return max(span.version for span in self.spans)

    @property
    def mean_version(self) -> float:
        """The token mean of the version counter (incarnations apart)."""
        total = sum(span.num_tokens for span in self.spans)
        if total == 0:
            return float(self.oldest_version.version)
        return sum(span.version.version * span.num_tokens for span in self.spans) / total


class GroupOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a group ended, told to its prompt source: trained at a step, or dropped for a reason."""

    group_id: str
    trained_at_step: int | None = None
    dropped: DropReason | None = None
    mean_reward: float | None = None
