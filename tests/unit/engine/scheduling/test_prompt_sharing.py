import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import InputError
from headrace.engine.scheduling.batch_plan import PlanItem, plan_batch
from headrace.engine.scheduling.prompt_sharing import PromptSharing
from headrace.engine.types import BatchPlan, MicroBatchPlan


def group(name: str, prompt: int, responses: list[int]) -> list[PlanItem]:
    return [
        PlanItem(
            record_id=f"{name}/{index}",
            group_id=name,
            num_tokens=prompt + response,
            num_loss_tokens=response,
            num_prompt_tokens=prompt,
        )
        for index, response in enumerate(responses)
    ]


def micro_batches(plan: BatchPlan) -> list[MicroBatchPlan]:
    return [batch for rank in plan.ranks for batch in rank.micro_batches if batch.record_ids]


def units_of(batch: MicroBatchPlan) -> list[tuple[str, ...]]:
    ends = itertools.accumulate(batch.shared)
    return [batch.record_ids[end - size : end] for end, size in zip(ends, batch.shared, strict=True)]


def loads_of(plan: BatchPlan) -> list[int]:
    return [sum(batch.num_tokens for batch in rank.micro_batches) for rank in plan.ranks]


def test_a_micro_batch_holds_a_prompt_once_and_counts_it_once() -> None:
    items = group("a", 45, [12] * 8) + group("b", 45, [12] * 8)
    plan = plan_batch(0, items, 1, 300, share_prompts=True)
    assert [(batch.num_tokens, batch.shared) for batch in micro_batches(plan)] == [(282, (8, 8))]
    assert micro_batches(plan)[0].record_ids == tuple(item.record_id for item in items)
    # Without sharing the same budget holds 5 records of 57 tokens.
    assert len(micro_batches(plan_batch(0, items, 1, 300))) == 4


def test_records_of_a_group_stay_together_though_others_stand_between_them() -> None:
    mixed = [item for pair in zip(group("a", 9, [3, 1, 2]), group("b", 9, [2, 2, 2]), strict=True) for item in pair]
    plan = plan_batch(0, mixed, 1, 15, share_prompts=True)
    assert [units_of(batch) for batch in micro_batches(plan)] == [[("a/0", "a/1", "a/2")], [("b/0", "b/1", "b/2")]]
    assert [batch.num_tokens for batch in micro_batches(plan)] == [15, 15]


def test_a_group_over_the_budget_takes_few_micro_batches_each_with_its_prompt() -> None:
    plan = plan_batch(0, group("a", 10, [6, 6, 4, 4, 3, 1]), 1, 22, share_prompts=True)
    assert [batch.num_tokens for batch in micro_batches(plan)] == [22, 22]
    assert sorted(len(batch.record_ids) for batch in micro_batches(plan)) == [2, 4]


def test_dynamic_order_a_record_over_the_budget_is_alone_and_whole() -> None:
    plan = plan_batch(0, group("a", 6, [8, 2, 2]), 1, 10, share_prompts=True)
    assert [(batch.num_tokens, batch.shared) for batch in micro_batches(plan)] == [(14, (1,)), (10, (2,))]


def test_records_without_a_common_prompt_length_share_nothing() -> None:
    items = [*group("a", 4, [3]), *group("b", 4, [3])]
    other = PlanItem(record_id="a/x", group_id="a", num_tokens=8, num_loss_tokens=1, num_prompt_tokens=5)
    unknown = PlanItem(record_id="a/y", group_id="a", num_tokens=8, num_loss_tokens=1)
    plan = plan_batch(0, [*items, other, unknown, unknown_of("a/z")], 1, 100, share_prompts=True)
    assert micro_batches(plan)[0].shared == (1, 1, 1, 1, 1)
    assert micro_batches(plan)[0].num_tokens == 7 + 7 + 8 + 8 + 8


def unknown_of(name: str) -> PlanItem:
    return PlanItem(record_id=name, group_id="a", num_tokens=8, num_loss_tokens=1)


def test_a_plan_that_does_not_share_says_nothing() -> None:
    assert micro_batches(plan_batch(0, group("a", 4, [1, 1]), 1, 100))[0].shared == ()


def test_a_group_is_divided_where_ranks_would_else_be_idle() -> None:
    plan = plan_batch(0, group("a", 10, [100] * 8), 4, 4096, share_prompts=True)
    assert loads_of(plan) == [210] * 4
    whole = plan_batch(0, group("a", 10, [100] * 8), 4, 4096, share_prompts=True, whole_groups=True)
    assert sorted(loads_of(whole)) == [0, 0, 0, 810]
    # A long prompt is not computed twice to save a few tokens.
    assert sorted(loads_of(plan_batch(0, group("a", 900, [5] * 8), 4, 4096, share_prompts=True))) == [0, 0, 0, 940]


def test_groups_that_balance_are_not_divided() -> None:
    items = [item for name in "abcd" for item in group(name, 50, [10] * 8)]
    plan = plan_batch(0, items, 2, 130, share_prompts=True)
    assert all(batch.shared == (8,) for batch in micro_batches(plan))


def test_a_known_hidden_size_keeps_units_as_narrow_as_pays() -> None:
    # Short prompt, long responses: attention over a shared row would cost more than the prompts that it saves.
    plan = plan_batch(0, group("a", 200, [1000] * 8), 1, 16_384, share_prompts=True, hidden_size=896)
    assert micro_batches(plan)[0].shared == (1,) * 8
    # Long prompt, short responses: one copy. In between, a part of the group.
    plan = plan_batch(0, group("a", 1000, [100] * 8), 1, 16_384, share_prompts=True, hidden_size=896)
    assert micro_batches(plan)[0].shared == (8,)
    plan = plan_batch(0, group("a", 1000, [1000] * 8), 1, 16_384, share_prompts=True, hidden_size=4096)
    assert micro_batches(plan)[0].shared == (4, 4)


def test_impossible_prompts_and_hidden_sizes_are_refused() -> None:
    wrong = PlanItem(record_id="r", group_id="g", num_tokens=3, num_loss_tokens=1, num_prompt_tokens=4)
    with pytest.raises(InputError, match="in the prompt"):
        plan_batch(0, [wrong], 1, 8, share_prompts=True)
    with pytest.raises(InputError, match="hidden_size 0"):
        plan_batch(0, [], 1, 8, share_prompts=True, hidden_size=0)


groups = st.lists(
    st.tuples(st.integers(0, 12), st.lists(st.integers(1, 15), min_size=1, max_size=6)), min_size=1, max_size=8
)


@settings(max_examples=150, deadline=None)
@given(
    groups,
    st.integers(1, 5),
    st.integers(1, 60),
    st.booleans(),
    st.sampled_from([None, 1, 16, 512]),
    st.integers(0, 1000),
)
def test_no_plan_loses_cuts_or_overfills_anything(
    drawn: list[tuple[int, list[int]]],
    ranks: int,
    budget: int,
    whole: bool,
    hidden: int | None,
    seed: int,
) -> None:
    items = [item for name, (prompt, responses) in enumerate(drawn) for item in group(f"g{name}", prompt, responses)]
    random.Random(seed).shuffle(items)
    plan = plan_batch(7, items, ranks, budget, whole_groups=whole, share_prompts=True, hidden_size=hidden)
    by_name = {item.record_id: item for item in items}
    order = {item.record_id: place for place, item in enumerate(items)}
    assert Counter(name for batch in micro_batches(plan) for name in batch.record_ids) == Counter(by_name.keys())
    assert len({len(rank.micro_batches) for rank in plan.ranks}) == 1
    for batch in micro_batches(plan):
        units = units_of(batch)
        assert sum(batch.shared) == len(batch.record_ids)
        assert all(len({(by_name[n].group_id, by_name[n].num_prompt_tokens) for n in unit}) == 1 for unit in units)
        assert all([order[name] for name in unit] == sorted(order[name] for name in unit) for unit in units)
        assert units == sorted(units, key=lambda unit: order[unit[0]])
        prompts = [by_name[unit[0]].num_prompt_tokens for unit in units]
        responses = [by_name[name].num_tokens - by_name[name].num_prompt_tokens for name in batch.record_ids]
        assert batch.num_tokens == sum(prompts) + sum(responses)
        assert batch.num_tokens <= budget or len(batch.record_ids) == 1
        if hidden is None:  # one copy of each prompt that there is
            copies = Counter(by_name[unit[0]].group_id for unit in units if by_name[unit[0]].num_prompt_tokens)
            assert all(count == 1 for count in copies.values())
    assert plan == plan_batch(7, items, ranks, budget, whole_groups=whole, share_prompts=True, hidden_size=hidden)
    assert (plan.num_loss_tokens, plan.num_sequences) == (sum(i.num_loss_tokens for i in items), len(items))
    assert plan.num_groups == len(drawn)


@settings(max_examples=60, deadline=None)
@given(groups, st.integers(2, 4))
def test_levelling_never_makes_the_fullest_rank_fuller(drawn: list[tuple[int, list[int]]], ranks: int) -> None:
    items = [item for name, (prompt, responses) in enumerate(drawn) for item in group(f"g{name}", prompt, responses)]
    sharing = PromptSharing(items, 10_000, None)
    units = sharing.cut(range(len(items)))
    shares = [units[rank::ranks] for rank in range(ranks)]
    levelled = sharing.level(shares)
    assert max(sum(unit.tokens for unit in share) for share in levelled) <= max(
        sum(unit.tokens for unit in share) for share in shares
    )
    assert sorted(index for share in levelled for unit in share for index in unit.indices) == list(range(len(items)))
