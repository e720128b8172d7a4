"""Recorded samples for tests of the learner."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from headrace.engine.types import FinishReason, PolicyVersion, Trajectory, VersionSpan

MakeRecord = Callable[..., Trajectory]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors gain nothing from a second thread, and lose much where cores are shared."""
    torch.set_num_threads(1)


@pytest.fixture
def make_record() -> MakeRecord:
    """Builds a record from prompt and response ids; everything else has a default."""

    def make(
        prompt: Sequence[int],
        response: Sequence[int],
        *,
        name: str = "g/0/0",
        mask: Sequence[int] | None = None,
        logprobs: Sequence[float] | None = None,
        version: int = 0,
        temperature: float = 1.0,
    ) -> Trajectory:
        size = len(response)
        return Trajectory(
            record_id=name,
            group_id=name.split("/")[0],
            prompt_id="p",
            sample_index=0,
            group_size=1,
            attempt=0,
            prompt_token_ids=np.array(prompt, dtype=np.int32),
            response_token_ids=np.array(response, dtype=np.int32),
            logprobs=np.full(size, -1.0, np.float32) if logprobs is None else np.array(logprobs, np.float32),
            loss_mask=np.ones(size, np.uint8) if mask is None else np.array(mask, np.uint8),
            spans=(VersionSpan(PolicyVersion(0, version), size),),
            finish_reason=FinishReason.STOP,
            temperature=temperature,
        )

    return make
