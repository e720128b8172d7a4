"""What must hold inside one trajectory. The encoder and the decoder check the very same rules.

- The arrays are one-dimensional; ids and log-probabilities and mask have one entry a response token.
- The mask is 0 or 1; where it is 0 the log-probability is 0, so that it can enter no ratio; everywhere it is finite.
- Spans cover the response tokens in order: every count is at least 1 and they sum to T. A response without tokens has
  exactly one span, of 0 tokens: the version that was asked.
- The sample finished: STOP, LENGTH or ABORTED.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine.types import FinishReason, Trajectory

_MAX_UINT32 = 2**32 - 1
_MAX_INT63 = 2**63 - 1
_INT32, _FLOAT32, _UINT8 = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")


def find_dtype_problem(t: Trajectory) -> str | None:
    """Say which array has a wrong dtype or number of dimensions, or None."""
    arrays: tuple[tuple[str, np.dtype[Any], npt.NDArray[Any]], ...] = (
        ("prompt_token_ids", _INT32, t.prompt_token_ids),
        ("response_token_ids", _INT32, t.response_token_ids),
        ("logprobs", _FLOAT32, t.logprobs),
        ("loss_mask", _UINT8, t.loss_mask),
    )
    for name, dtype, array in arrays:
        if array.dtype != dtype or array.ndim != 1:
            return f"{name} is {array.dtype} with {array.ndim} dimensions; it must be {dtype} with 1 dimension"
    return None


def find_problem(t: Trajectory, num_loss_tokens: int) -> str | None:
    """Say in one clause what is wrong with a trajectory whose dtypes are right, or None."""
    return _find_field_problem(t) or _find_span_problem(t) or _find_token_problem(t, num_loss_tokens)


def count_loss_tokens(t: Trajectory) -> int:
    """Response tokens with a mask other than 0."""
    return int(np.count_nonzero(t.loss_mask))


def _find_field_problem(t: Trajectory) -> str | None:
    if not t.record_id or not t.group_id:
        return "record_id and group_id must not be empty"
    if not 0 <= t.sample_index < t.group_size <= _MAX_UINT32:
        return f"sample_index is {t.sample_index} in a group of {t.group_size}; it counts from 0 to group_size - 1"
    if not 0 <= t.attempt <= _MAX_UINT32:
        return f"attempt is {t.attempt}; it counts from 0"
    if t.finish_reason == FinishReason.NONE:
        return "finish_reason is NONE; only finished samples are recorded"
    if not (math.isfinite(t.temperature) and t.temperature >= 0):
        return f"temperature is {t.temperature}; it must be finite and at least 0"
    if not (math.isfinite(t.started_at_s) and math.isfinite(t.finished_at_s)):
        return "started_at_s and finished_at_s must be finite"
    return None


def _find_span_problem(t: Trajectory) -> str | None:
    num_tokens = t.response_token_ids.size
    if not t.spans:
        return "there is no version span; a response without tokens has one span of 0 tokens"
    total = 0
    for (incarnation, version), count in t.spans:
        if not (0 <= incarnation <= _MAX_UINT32 and 0 <= version <= _MAX_INT63):
            return f"a span names version {incarnation}:{version}; neither part may be negative or beyond its range"
        if count < 1 and not (num_tokens == 0 and len(t.spans) == 1 and count == 0):
            return f"a version span covers {count} tokens; each covers at least 1"
        total += count
    if total != num_tokens:
        return f"the version spans cover {total} tokens; the response has {num_tokens}"
    return None


def _find_token_problem(t: Trajectory, num_loss_tokens: int) -> str | None:
    num_tokens = t.response_token_ids.size
    if t.logprobs.size != num_tokens or t.loss_mask.size != num_tokens:
        return (
            f"the response has {num_tokens} tokens, {t.logprobs.size} log-probabilities and {t.loss_mask.size} mask "
            "entries; the numbers must be equal"
        )
    for name, ids in (("prompt", t.prompt_token_ids), ("response", t.response_token_ids)):
        if ids.size and np.minimum.reduce(ids) < 0:
            return f"a {name} token id is negative"
    if not num_tokens:
        return None
    if np.maximum.reduce(t.loss_mask) > 1:
        return "the loss mask holds a value other than 0 and 1"
    if np.count_nonzero(np.isfinite(t.logprobs)) != num_tokens:
        return "a log-probability is not finite"
    if num_loss_tokens != num_tokens and t.logprobs[t.loss_mask == 0].any():
        return "a token with loss mask 0 has a log-probability other than 0"
    return None
