# pyright: basic
# torch is only partly typed.
"""A micro-batch as a loss sees it, on the device of the scores."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.engine.types import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLossInputs:
    """Implements `headrace.engine.interfaces.LossInputs`; see there for shapes."""

    logprobs: Tensor
    entropy: Tensor | None
    proximal_logprobs: Tensor
    behaviour_logprobs: Tensor
    reference_logprobs: Tensor | None
    teacher_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    sequence_ids: Tensor
    group_ids: Tensor | None
    kl_coef: float
    num_loss_tokens: int
    num_sequences: int
    num_groups: int

    @classmethod
    def build(
        cls,
        micro_batch: MicroBatch,
        *,
        logprobs: Tensor,
        entropy: Tensor | None,
        advantages: npt.NDArray[np.float32],
        num_loss_tokens: int,
        num_sequences: int,
        num_groups: int,
        kl_coef: float = 0.0,
    ) -> "TensorLossInputs":
        """Move a micro-batch's columns beside the scores; the proximal policy is the detached current one."""
        device = logprobs.device

        def column(values: npt.NDArray[np.float32] | None) -> Tensor | None:
            return None if values is None else torch.from_numpy(values).to(device)

        groups = micro_batch.group_ids
        return cls(
            logprobs=logprobs,
            entropy=entropy,
            proximal_logprobs=logprobs.detach(),
            behaviour_logprobs=torch.from_numpy(micro_batch.behaviour_logprobs).to(device),
            reference_logprobs=column(micro_batch.reference_logprobs),
            teacher_logprobs=column(micro_batch.teacher_logprobs),
            advantages=torch.from_numpy(advantages).to(device),
            loss_mask=torch.from_numpy(micro_batch.loss_mask != 0).to(device),
            sequence_ids=torch.from_numpy(micro_batch.sequence_ids.astype(np.int64)).to(device),
            group_ids=None if groups is None else torch.from_numpy(groups.astype(np.int64)).to(device),
            kl_coef=kl_coef,
            num_loss_tokens=num_loss_tokens,
            num_sequences=num_sequences,
            num_groups=num_groups,
        )
