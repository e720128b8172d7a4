"""The types that travel between roles: frozen, keyword-only, each array with its shape, dtype and unit.

None of them needs torch; arrays are numpy. Types that are encoded as records or configuration are msgspec structs.
"""

from headrace.engine.types.learning import (
    AlgorithmTraits,
    BatchPlan,
    ColumnName,
    MicroBatch,
    MicroBatchPlan,
    RankPlan,
    StepBatch,
    StepResult,
)
from headrace.engine.types.policy import PolicyVersion, VersionSpan
from headrace.engine.types.reward import RewardOutcome, RewardSample, RewardStatus
from headrace.engine.types.rollout import (
    DropReason,
    EngineState,
    FinishReason,
    GenerateRequest,
    GroupOutcome,
    Message,
    PauseMode,
    Prompt,
    PromptGroup,
    SamplingParams,
    TokenChunk,
    Trajectory,
)
from headrace.engine.types.scores import TokenScores, TokenSequence
from headrace.engine.types.weights import (
    AckStatus,
    BucketEncoding,
    TensorSpec,
    UpdateKind,
    WeightAck,
    WeightBucket,
    WeightManifest,
    WeightPart,
    WeightUpdate,
)

__all__ = [
    "AckStatus",
    "AlgorithmTraits",
    "BatchPlan",
    "BucketEncoding",
    "ColumnName",
    "DropReason",
    "EngineState",
    "FinishReason",
    "GenerateRequest",
    "GroupOutcome",
    "Message",
    "MicroBatch",
    "MicroBatchPlan",
    "PauseMode",
    "PolicyVersion",
    "Prompt",
    "PromptGroup",
    "RankPlan",
    "RewardOutcome",
    "RewardSample",
    "RewardStatus",
    "SamplingParams",
    "StepBatch",
    "StepResult",
    "TensorSpec",
    "TokenChunk",
    "TokenScores",
    "TokenSequence",
    "Trajectory",
    "UpdateKind",
    "VersionSpan",
    "WeightAck",
    "WeightBucket",
    "WeightManifest",
    "WeightPart",
    "WeightUpdate",
]
