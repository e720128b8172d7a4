"""From the plan to the scores: what is planned to share is computed once, and scores as if each record were alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headrace.actors.learner.forward import PackedForward
from headrace.actors.learner.packing import build_micro_batch, build_step_batch, in_input_order
from headrace.actors.models import load_causal_lm
from headrace.actors.tiny import build_tiny_model
from headrace.engine.scheduling.batch_plan import PlanItem, plan_batch
from headrace.engine.types import BatchPlan, MicroBatch, Trajectory

MakeRecord = Callable[..., Trajectory]


def step_of(plan: BatchPlan, rank: int, records: Sequence[Trajectory]) -> tuple[MicroBatch, ...]:
    names = [record.record_id for record in records]
    share = SimpleNamespace(
        micro_batches=plan.ranks[rank].micro_batches,
        num_loss_tokens=plan.num_loss_tokens,
        num_sequences=plan.num_sequences,
        num_groups=plan.num_groups,
    )
    return build_step_batch(
        step=0,
        plan=share,
        trajectories=dict(zip(names, records, strict=True)),
        advantages=dict.fromkeys(names, 1.0),
    ).micro_batches


@pytest.mark.parametrize(("ranks", "budget"), [(1, 400), (2, 80), (1, 40)])
def test_dynamic_order_scores_of_a_shared_plan_are_those_of_each_record_alone(
    tmp_path: Path, make_record: MakeRecord, ranks: int, budget: int
) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, 20).tolist() for _ in range(5)]
    records: list[Trajectory] = []
    for sample in range(4):  # members of a group do not arrive side by side
        for group, prompt in enumerate(prompts):
            response = rng.integers(0, 256, rng.integers(1, 12)).tolist()
            mask = [0] * (sample == 3 and len(response) > 2) + [1] * len(response)  # a masked start of its own
            records.append(make_record(prompt, response, mask=mask[: len(response)], name=f"g{group}/{sample}/0"))
    items = [
        PlanItem(
            record_id=t.record_id,
            group_id=t.group_id,
            num_tokens=t.prompt_token_ids.size + t.response_token_ids.size,
            num_loss_tokens=int(t.loss_mask.sum()),
            num_prompt_tokens=t.prompt_token_ids.size,
        )
        for t in records
    ]
    plan = plan_batch(0, items, ranks, budget, share_prompts=True)
    micro_batches = [m for rank in range(ranks) for m in step_of(plan, rank, records)]
    plans = [m for rank in plan.ranks for m in rank.micro_batches]
    forward = PackedForward(load_causal_lm(build_tiny_model(tmp_path, "llama")), torch.device("cpu"))
    with torch.no_grad():
        results = [forward(m) for m in micro_batches]
        alone = [forward(build_micro_batch([record], [1.0], step=0)).logprobs for record in records]
    scores = in_input_order([t.record_id for t in records], micro_batches, [r.logprobs.numpy() for r in results])
    for score, expected in zip(scores, alone, strict=True):
        np.testing.assert_allclose(score, expected.numpy(), atol=2e-5)
    for planned, packed, result in zip(plans, micro_batches, results, strict=True):
        assert packed.shared == planned.shared
        if len(planned.shared) == 1:  # one row, so nothing is padded
            assert result.num_computed <= planned.num_tokens
    forward.close()
