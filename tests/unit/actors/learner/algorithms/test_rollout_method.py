# pyright: basic
# torch is only partly typed.
"""What the methods share: a sample that takes no forward pass must not change the step."""

from typing import Any

import pytest
import torch

from headrace.actors.learner.algorithms.grpo import Grpo
from headrace.actors.learner.loss_inputs import TensorLossInputs
from headrace.engine.config import AlgorithmConfig
from headrace.engine.config.algorithm import ImportanceConfig

# Five sequences of two tokens: their credit, and how far each sampler's log-probability lies below the learner's.
CREDIT = (1.0, -0.5, 0.0, 0.0, 0.0)
GAP = (0.1, 1.5, 1.5, 1.5, 0.2)


def step_gradient(method: Grpo, rows: list[int]) -> list[float]:
    """The gradient that a trainer descends when it scores these sequences alone; 0 where a sequence is left out."""
    ids = torch.arange(len(rows)).repeat_interleave(2)
    logprobs = torch.full((2 * len(rows),), -2.0, requires_grad=True)
    inputs = TensorLossInputs(
        logprobs=logprobs,
        entropy=None,
        proximal_logprobs=logprobs.detach(),
        behaviour_logprobs=-2.0 - torch.tensor([GAP[row] for row in rows])[ids],
        reference_logprobs=None,
        teacher_logprobs=None,
        advantages=torch.tensor([CREDIT[row] for row in rows])[ids],
        loss_mask=torch.ones(len(ids), dtype=torch.bool),
        sequence_ids=ids,
        group_ids=None,
        kl_coef=0.0,
        num_loss_tokens=10,
        num_sequences=5,
        num_groups=1,
    )
    output = method.loss(inputs)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    factor = output.denominator / (output.denominator - float(output.rejected))
    whole = torch.zeros(len(CREDIT), 2)
    whole[rows] = factor * gradient.reshape(-1, 2)
    return whole.flatten().tolist()


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
@pytest.mark.parametrize(
    ("importance", "skips"),
    [
        (ImportanceConfig(), True),
        (ImportanceConfig(kind="mask"), False),
        (ImportanceConfig(reject_above=2.0), False),
        (ImportanceConfig(reject_below=1.15), False),
        (ImportanceConfig(kind="mask", fixed_denominator=True), True),
    ],
)
def test_leaving_out_samples_without_credit_changes_no_step(
    normalization: Any, importance: ImportanceConfig, skips: bool
) -> None:
    """A rule that rejects some of them takes those out of the mean, and that is known after a forward pass alone."""
    method = Grpo(AlgorithmConfig(normalization=normalization, length_constant=4, importance=importance))
    assert method.traits.skips_zero_credit == skips
    rows = [row for row, credit in enumerate(CREDIT) if credit or not skips]
    assert step_gradient(method, rows) == pytest.approx(step_gradient(method, list(range(len(CREDIT)))), abs=1e-7)
