"""What a scorer gets and gives."""

import enum
from typing import Any

import msgspec

from headrace.engine.types.rollout import FinishReason


class RewardStatus(enum.IntEnum):
    """How scoring one sample ended; the numbers are those of the wire."""

    OK = 1
    TIMEOUT = 2
    ERROR = 3
    ABSTAIN = 4


class RewardSample(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sample: text and token ids side by side."""

    sample_id: str
    group_id: str = ""
    prompt_text: str = ""
    response_text: str = ""
    prompt_token_ids: tuple[int, ...] = ()
    response_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    data: dict[str, Any] = {}


class RewardOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one sample. `value` is finite and meaningful only with OK; there is no silent zero."""

    sample_id: str
    status: RewardStatus
    value: float = 0.0
    metrics: dict[str, float] = {}
    message: str = ""
