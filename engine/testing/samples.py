"""Valid objects for tests, without randomness: change the fields that a test is about."""

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine.types import FinishReason, PolicyVersion, Trajectory, VersionSpan


def make_trajectory(num_prompt: int = 3, num_response: int = 5, **changes: Any) -> Trajectory:
    """A valid trajectory of sample 1 of group "g-7"; its last response token was appended, not sampled.

    Args:
        num_prompt, num_response: Lengths P and T of the arrays.
        changes: Fields of `Trajectory` to replace.
    """
    mask = np.ones(num_response, np.uint8)
    logprobs = np.linspace(-0.5, -2.0, num_response, dtype=np.float32)
    mask[-1:] = 0
    logprobs[-1:] = 0
    fields: dict[str, Any] = {
        "record_id": "g-7/1/0",
        "group_id": "g-7",
        "prompt_id": "p-3",
        "sample_index": 1,
        "group_size": 4,
        "attempt": 0,
        "prompt_token_ids": np.arange(10, 10 + num_prompt, dtype=np.int32),
        "response_token_ids": np.arange(100, 100 + num_response, dtype=np.int32),
        "logprobs": logprobs,
        "loss_mask": mask,
        "spans": (VersionSpan(PolicyVersion(0, 3), num_response),),
        "finish_reason": FinishReason.STOP,
        "temperature": 0.75,
        "prompt_text": "2 + 2 =",
        "response_text": "four \u2713",
        "data": {"answer": "4", "tags": ["sum", 1, None]},
        "started_at_s": 1_700_000_000.25,
        "finished_at_s": 1_700_000_001.5,
    }
    return Trajectory(**{**fields, **changes})


def assert_same_trajectory(actual: Trajectory, expected: Trajectory) -> None:
    """Compare every field, arrays with their dtype.

    Raises:
        AssertionError: Names the first field that differs.
    """
    for name in Trajectory.__struct_fields__:
        left, right = getattr(actual, name), getattr(expected, name)
        same = _same_array(left, right) if hasattr(right, "dtype") else bool(left == right)
        if not same:
            raise AssertionError(f"{name} is {left!r}; {right!r} was expected")


def _same_array(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> bool:
    return left.dtype == right.dtype and np.array_equal(left, right)
