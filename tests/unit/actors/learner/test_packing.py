from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from headrace.actors.learner.packing import build_micro_batch, build_step_batch, in_input_order
from headrace.engine.errors import InputError
from headrace.engine.scheduling.batch_plan import PlanItem, plan_batch
from headrace.engine.types import (
    BatchPlan,
    MicroBatch,
    MicroBatchPlan,
    PolicyVersion,
    RankPlan,
    Trajectory,
    VersionSpan,
)

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

    share = Share(plan.ranks[0].micro_batches, plan.num_loss_tokens, plan.num_sequences, plan.num_groups)
    batch = build_step_batch(step=7, plan=share, trajectories=records, advantages=dict.fromkeys(records, 1.0))
    assert [micro_batch.record_ids for micro_batch in batch.micro_batches] == [("b/0/0", "a/1/0"), ("",)]
    assert (batch.step, batch.num_loss_tokens, batch.num_sequences, batch.num_groups) == (7, 9, 3, 2)
    del records["a/1/0"]
    with pytest.raises(InputError, match="a/1/0"):
        build_step_batch(step=7, plan=share, trajectories=records, advantages=dict.fromkeys(records, 1.0))


def items_of(trajectories: list[Trajectory]) -> list[PlanItem]:
    return [
        PlanItem(
            record_id=t.record_id,
            group_id=t.group_id,
            num_tokens=t.prompt_token_ids.size + t.response_token_ids.size,
            num_loss_tokens=int(t.loss_mask.sum()),
            num_prompt_tokens=t.prompt_token_ids.size,
        )
        for t in trajectories
    ]


def pack(plan: BatchPlan, trajectories: list[Trajectory]) -> list[MicroBatch]:
    """The micro-batches of all ranks."""
    by_name = {t.record_id: t for t in trajectories}
    credit = dict.fromkeys(by_name, 1.0)
    packed: list[MicroBatch] = []
    for rank in plan.ranks:
        share = Share(rank.micro_batches, plan.num_loss_tokens, plan.num_sequences, plan.num_groups)
        packed += build_step_batch(step=0, plan=share, trajectories=by_name, advantages=credit).micro_batches
    return packed


@dataclass
class Share:
    micro_batches: Sequence[MicroBatchPlan]
    num_loss_tokens: int
    num_sequences: int
    num_groups: int


@pytest.mark.parametrize("lengths", [[9, 2, 7, 3, 5], [9, 2, 7, 3, 5, 14]])
@pytest.mark.parametrize("ranks", [1, 7])  # with 7 ranks there are padding micro-batches
@pytest.mark.parametrize("share", [False, True])
def test_dynamic_order_results_come_back_in_the_order_of_the_batch(
    make_record: MakeRecord, lengths: list[int], ranks: int, share: bool
) -> None:
    # The response of record i holds 10 * i; the "model" answers with the token that it is given.
    records = [make_record([1], [10 * i] * (n - 1), name=f"g{i % 2}/{i}/0") for i, n in enumerate(lengths)]
    packed = pack(plan_batch(0, items_of(records), ranks, 10, share_prompts=share), records)
    assert any(m.record_ids == ("",) for m in packed) == (ranks == 7)
    names = [t.record_id for t in records]
    results = in_input_order(names, packed, [m.token_ids * m.loss_mask for m in packed])
    assert [int(result.max()) for result in results] == [10 * i for i in range(len(lengths))]
    assert [result.size for result in results] == lengths
    with pytest.raises(InputError, match="no result"):
        in_input_order([*names, "g9/0/0"], packed, [m.loss_mask for m in packed])
    with pytest.raises(InputError, match="two micro-batches"):
        in_input_order(names, packed * 2, [m.loss_mask for m in packed * 2])
    with pytest.raises(InputError, match=r"give \[N\]"):
        in_input_order(names, packed, [m.temperature[:0] for m in packed])


def test_partial_last_batch_counts_for_what_it_holds(make_record: MakeRecord) -> None:
    # 10 samples of one token, three updates of at most 4, micro-batches of 2: each update's weights add up to 1.
    records = [make_record([1], [2], name=f"g/{i}/0") for i in range(10)]
    for start in (0, 4, 8):
        update = records[start : start + 4]
        plan = plan_batch(0, items_of(update), 1, 4)
        packed = pack(plan, update)
        assert len(packed) == (2 if start < 8 else 1)
        assert sum(int(m.loss_mask.sum()) for m in packed) / plan.num_loss_tokens == 1.0


def test_all_masked_records_stand_in_the_batch_without_a_loss_token(make_record: MakeRecord) -> None:
    records = [make_record([1], [2, 3], mask=[0, 0], name="a/0/0"), make_record([1], [4], mask=[0], name="a/1/0")]
    plan = plan_batch(0, items_of(records), 1, 8, share_prompts=True)
    (packed,) = pack(plan, records)
    assert (plan.num_loss_tokens, plan.num_sequences, packed.loss_mask.sum()) == (0, 0, 0)
    assert not packed.advantages.any() and not packed.behaviour_logprobs.any()


def test_left_padding_has_no_place_and_positions_start_anew_in_each_sequence(make_record: MakeRecord) -> None:
    mine, other = make_record([11], [12, 13]), make_record([0, 0, 20], [0])
    for records, start in (([mine], 0), ([other, mine], 4), ([mine, other], 0)):
        packed = build_micro_batch(records, [1.0] * len(records), step=0)
        assert packed.position_ids[start : start + 3].tolist() == [0, 1, 2]
        assert packed.token_ids[start : start + 3].tolist() == [11, 12, 13]


def test_partial_continuation_trains_on_what_its_mask_says_and_counts_the_oldest_version(
    make_record: MakeRecord,
) -> None:
    record = make_record([1, 2], [3] * 100, mask=[0] * 60 + [1] * 40, version=7)
    record = msgspec.structs.replace(
        record, spans=(VersionSpan(PolicyVersion(0, 7), 60), VersionSpan(PolicyVersion(0, 8), 40))
    )
    packed = build_micro_batch([record], [1.0], step=9)
    assert packed.loss_mask.tolist() == [0] * 62 + [1] * 40
    assert packed.lags.tolist() == [2]


def test_sharing_units_and_groups_are_told_and_units_of_unlike_prompts_divided(make_record: MakeRecord) -> None:
    records = [make_record(prompt, [5], name=f"g/{i}/0") for i, prompt in enumerate(([1, 2], [1, 2], [1, 3], [1, 2]))]
    records.append(make_record([1, 2], [6], name="h/0/0"))
    packed = build_micro_batch(records, [1.0] * 5, step=0, shared=(4, 1))
    assert packed.shared == (2, 1, 1, 1)
    assert packed.group_ids is not None and packed.group_ids.tolist() == [0, 0, 0, 0, 1]
    assert build_micro_batch(records, [1.0] * 5, step=0).shared == ()
    for wrong in ((3, 1), (5, 0), (6,)):
        with pytest.raises(InputError, match="do not add up"):
            build_micro_batch(records, [1.0] * 5, step=0, shared=wrong)


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
