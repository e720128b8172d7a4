from collections.abc import Callable

import numpy as np
import pytest

from headrace.actors.learner.packing import build_micro_batch, build_step_batch
from headrace.engine.errors import InputError
from headrace.engine.types import BatchPlan, MicroBatchPlan, RankPlan, Trajectory

MakeRecord = Callable[..., Trajectory]


def test_sequences_lie_end_to_end_and_positions_restart(make_record: MakeRecord) -> None:
    first = make_record([5, 6], [7, 8, 9], name="a/0/0", logprobs=[-0.1, -0.2, -0.3], version=3)
    second = make_record([1], [2], name="b/0/0", logprobs=[-0.4], version=5, temperature=0.5)
    packed = build_micro_batch([first, second], [1.5, -2.0], step=6)
    assert packed.token_ids.tolist() == [5, 6, 7, 8, 9, 1, 2]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert packed.sequence_ids.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert packed.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 1]
    assert packed.behaviour_logprobs == pytest.approx([0, 0, -0.1, -0.2, -0.3, 0, -0.4])
    assert packed.advantages.tolist() == [0, 0, 1.5, 1.5, 1.5, 0, -2]
    assert packed.temperature.tolist() == [1.0, 0.5]
    assert packed.record_ids == ("a/0/0", "b/0/0")
    assert packed.lags.tolist() == [3, 1]
    dtypes = {name: getattr(packed, name).dtype.name for name in ("token_ids", "loss_mask", "advantages", "lags")}
    assert dtypes == {"token_ids": "int32", "loss_mask": "uint8", "advantages": "float32", "lags": "int32"}


def test_mask_from_length_and_record_never_from_end_or_padding_ids(make_record: MakeRecord) -> None:
    # Id 0 is end and padding at once; a recorded end, a cut response and a 0 in the middle are all trained on.
    rows = [[5, 6, 0], [5, 6, 7], [5, 0, 6, 7, 8]]
    packed = build_micro_batch([make_record([9], row) for row in rows], [1.0] * 3, step=0)
    assert packed.loss_mask.tolist() == [0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1]


def test_appended_eos_carries_no_loss_and_its_log_probability_is_never_used(make_record: MakeRecord) -> None:
    record = make_record([9], [5, 6, 7, 2], mask=[1, 1, 1, 0], logprobs=[-1, -1, -1, float("nan")])
    packed = build_micro_batch([record], [2.0], step=0)
    assert packed.loss_mask.tolist() == [0, 1, 1, 1, 0]
    assert packed.behaviour_logprobs.tolist() == [0, -1, -1, -1, 0]
    assert packed.advantages.tolist() == [0, 2, 2, 2, 0]


def test_an_empty_plan_gives_one_padding_token_without_loss(make_record: MakeRecord) -> None:
    packed = build_micro_batch([], [], step=4)
    assert (packed.token_ids.size, packed.loss_mask.sum(), packed.advantages.sum()) == (1, 0, 0)


def test_a_step_batch_follows_its_plan(make_record: MakeRecord) -> None:
    records = {name: make_record([1], [2, 3], name=name) for name in ("a/0/0", "a/1/0", "b/0/0")}
    micro_batches = (
        MicroBatchPlan(record_ids=("b/0/0", "a/1/0"), num_tokens=6),
        MicroBatchPlan(record_ids=(), num_tokens=0),
    )
    rank = RankPlan(micro_batches=micro_batches)
    plan = BatchPlan(step=7, ranks=(rank,), num_loss_tokens=9, num_sequences=3, num_groups=2)

    class Share:
        micro_batches = plan.ranks[0].micro_batches
        num_loss_tokens, num_sequences, num_groups = plan.num_loss_tokens, plan.num_sequences, plan.num_groups

    batch = build_step_batch(step=7, plan=Share(), trajectories=records, advantages=dict.fromkeys(records, 1.0))
    assert [micro_batch.record_ids for micro_batch in batch.micro_batches] == [("b/0/0", "a/1/0"), ("",)]
    assert (batch.step, batch.num_loss_tokens, batch.num_sequences, batch.num_groups) == (7, 9, 3, 2)
    del records["a/1/0"]
    with pytest.raises(InputError, match="a/1/0"):
        build_step_batch(step=7, plan=Share(), trajectories=records, advantages=dict.fromkeys(records, 1.0))


@pytest.mark.parametrize(
    ("given", "advantage", "what"),
    [
        ({"prompt": []}, 1.0, "empty prompt"),
        ({"logprobs": [-1.0, float("nan")]}, 1.0, "not finite"),
        ({"logprobs": [-1.0]}, 1.0, "must agree"),
        ({"temperature": 0.0}, 1.0, "temperature"),
        ({}, float("nan"), "advantage"),
    ],
)
def test_a_record_that_cannot_be_trained_on_is_named(
    make_record: MakeRecord, given: dict[str, object], advantage: float, what: str
) -> None:
    record = make_record(given.pop("prompt", [1]), [2, 3], name="g/7/0", **given)
    with pytest.raises(InputError, match=what) as caught:
        build_micro_batch([record], [advantage], step=0)
    assert "g/7/0" in str(caught.value)


def test_counts_of_records_and_advantages_must_agree(make_record: MakeRecord) -> None:
    with pytest.raises(InputError, match="one advantage a record"):
        build_micro_batch([make_record([1], [2])], [], step=0)
    assert np.array_equal(build_micro_batch([make_record([1], [2])], [0.0], step=0).token_ids, [1, 2])
