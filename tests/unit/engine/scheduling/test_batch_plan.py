import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import InputError
from headrace.engine.scheduling.batch_plan import PlanItem, plan_batch
from headrace.engine.types import BatchPlan


def items_of(lengths: list[int], loss: list[int] | None = None, group_size: int = 1) -> list[PlanItem]:
    return [
        PlanItem(
            record_id=f"r{index}",
            group_id=f"g{index // group_size}",
            num_tokens=length,
            num_loss_tokens=length // 2 if loss is None else loss[index],
        )
        for index, length in enumerate(lengths)
    ]


def records(plan: BatchPlan) -> list[str]:
    return [name for rank in plan.ranks for batch in rank.micro_batches for name in batch.record_ids]


def test_dynamic_order_every_record_is_planned_once_in_at_least_three_micro_batches() -> None:
    plan = plan_batch(0, items_of([9, 2, 7, 3, 5]), 1, 10)
    assert [batch.num_tokens for batch in plan.ranks[0].micro_batches] == [10, 9, 7]
    # Names say where each result belongs; within a micro-batch they keep the order of the input.
    assert [batch.record_ids for batch in plan.ranks[0].micro_batches] == [("r2", "r3"), ("r0",), ("r1", "r4")]


def test_dynamic_order_a_record_over_the_budget_gets_a_micro_batch_of_its_own() -> None:
    plan = plan_batch(0, items_of([9, 2, 7, 3, 5, 14]), 1, 10)
    assert plan.ranks[0].micro_batches[0].record_ids == ("r5",)
    assert plan.ranks[0].micro_batches[0].num_tokens == 14
    assert sorted(records(plan)) == [f"r{index}" for index in range(6)]


def test_partial_last_batch_three_records_on_two_ranks_are_three_and_padding_is_empty() -> None:
    plan = plan_batch(0, items_of([4, 4, 4]), 2, 4)
    assert sorted(records(plan)) == ["r0", "r1", "r2"]
    assert [len(rank.micro_batches) for rank in plan.ranks] == [2, 2]
    assert plan.ranks[1].micro_batches[1].record_ids == () and plan.ranks[1].micro_batches[1].num_tokens == 0


def test_all_masked_records_without_loss_tokens_are_planned_but_not_counted() -> None:
    plan = plan_batch(3, items_of([4, 4, 4, 4], [2, 0, 3, 0], group_size=2), 2, 4)
    assert sorted(records(plan)) == ["r0", "r1", "r2", "r3"]
    assert (plan.step, plan.num_loss_tokens, plan.num_sequences, plan.num_groups) == (3, 5, 2, 2)
    nothing = plan_batch(0, items_of([4, 4], [0, 0]), 1, 8)
    assert nothing.num_loss_tokens == 0 and len(records(nothing)) == 2


def test_an_empty_batch_has_no_micro_batches_and_more_ranks_than_records_are_padded() -> None:
    assert [rank.micro_batches for rank in plan_batch(0, [], 2, 8).ranks] == [(), ()]
    assert [len(rank.micro_batches) for rank in plan_batch(0, items_of([3]), 3, 8).ranks] == [1, 1, 1]


@pytest.mark.parametrize("ranks, budget", [(0, 8), (1, 0)])
def test_impossible_ranks_and_budgets_are_refused(ranks: int, budget: int) -> None:
    with pytest.raises(InputError, match="at least 1"):
        plan_batch(0, items_of([1]), ranks, budget)


def test_records_given_twice_or_with_impossible_counts_are_refused() -> None:
    one = items_of([4])
    with pytest.raises(InputError, match="twice"):
        plan_batch(0, one + one, 1, 8)
    for length, loss in ((0, 0), (4, 5), (4, -1)):
        with pytest.raises(InputError, match="in the loss"):
            plan_batch(0, items_of([length], [loss]), 1, 8)


def test_whole_groups_stay_on_one_rank_and_in_one_micro_batch_where_they_fit() -> None:
    items = items_of([9, 2, 7, 3, 5, 5, 8, 8, 8], group_size=3)
    plan = plan_batch(0, items, 2, 18, whole_groups=True)
    assert [[batch.record_ids for batch in rank.micro_batches] for rank in plan.ranks] == [
        [("r6", "r7"), ("r8",)],
        [("r0", "r1", "r2"), ("r3", "r4", "r5")],
    ]
    assert [[batch.num_tokens for batch in rank.micro_batches] for rank in plan.ranks] == [[16, 8], [18, 13]]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 6), st.integers(1, 50))
def test_no_plan_loses_cuts_or_overfills_anything(lengths: list[int], ranks: int, budget: int) -> None:
    items = items_of(lengths)
    plan = plan_batch(0, items, ranks, budget)
    assert plan == plan_batch(0, items, ranks, budget)
    assert Counter(records(plan)) == Counter(item.record_id for item in items)
    assert len(plan.ranks) == ranks
    assert len({len(rank.micro_batches) for rank in plan.ranks}) == 1
    sizes = {item.record_id: item.num_tokens for item in items}
    loads = []
    for rank in plan.ranks:
        for batch in rank.micro_batches:
            assert batch.num_tokens == sum(sizes[name] for name in batch.record_ids)
            assert batch.num_tokens <= budget or len(batch.record_ids) == 1
            assert list(batch.record_ids) == sorted(batch.record_ids, key=lambda name: int(name[1:]))
        tokens = [batch.num_tokens for batch in rank.micro_batches]
        assert tokens == sorted(tokens, reverse=True)
        # Two that fit together are never apart: the packing is at least half full.
        assert all(one + other > budget for one, other in itertools.pairwise(tokens) if other)
        loads.append(sum(tokens))
    assert max(loads) - min(loads) <= max(lengths, default=0)


def least_fullest_rank(sizes: Sequence[int], num_ranks: int) -> int:
    """By trying every assignment of sizes to ranks."""
    return min(
        max(sum(s for s, place in zip(sizes, places, strict=True) if place == rank) for rank in range(num_ranks))
        for places in itertools.product(range(num_ranks), repeat=len(sizes))
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_the_fullest_rank_is_within_a_third_of_the_best_there_is(lengths: list[int], ranks: int) -> None:
    plan = plan_batch(0, items_of(lengths), ranks, 1000)
    fullest = max(sum(batch.num_tokens for batch in rank.micro_batches) for rank in plan.ranks)
    assert 3 * ranks * fullest <= (4 * ranks - 1) * least_fullest_rank(lengths, ranks)  # Graham's bound


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 90),
    st.integers(1, 6),
)
def test_no_plan_divides_a_group_that_must_be_whole(
    lengths: list[int], ranks: int, budget: int, group_size: int
) -> None:
    items = items_of(lengths, group_size=group_size)
    plan = plan_batch(0, items, ranks, budget, whole_groups=True)
    assert Counter(records(plan)) == Counter(item.record_id for item in items)
    assert len({len(rank.micro_batches) for rank in plan.ranks}) == 1
    sizes = {item.record_id: item.num_tokens for item in items}
    groups = {item.record_id: item.group_id for item in items}
    where: dict[str, set[tuple[int, int]]] = {}
    for at, rank in enumerate(plan.ranks):
        for number, batch in enumerate(rank.micro_batches):
            assert batch.num_tokens == sum(sizes[name] for name in batch.record_ids)
            assert batch.num_tokens <= budget or len(batch.record_ids) == 1
            for name in batch.record_ids:
                where.setdefault(groups[name], set()).add((at, number))
    for group_id, places in where.items():
        assert len({rank for rank, _ in places}) == 1
        if sum(size for name, size in sizes.items() if groups[name] == group_id) <= budget:
            assert len(places) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 5), st.integers(0, 1000), st.booleans())
def test_totals_do_not_depend_on_the_order_of_the_records(
    lengths: list[int], ranks: int, seed: int, whole: bool
) -> None:
    items = items_of(lengths, group_size=4)
    mixed = random.Random(seed).sample(items, len(items))
    one, other = (plan_batch(0, given, ranks, 64, whole_groups=whole) for given in (items, mixed))
    assert (one.num_loss_tokens, one.num_sequences, one.num_groups) == (
        other.num_loss_tokens,
        other.num_sequences,
        other.num_groups,
    )
    loads = [sorted(sum(b.num_tokens for b in rank.micro_batches) for rank in p.ranks) for p in (one, other)]
    assert loads[0] == loads[1]
    assert len(one.ranks[0].micro_batches) == len(other.ranks[0].micro_batches) or whole


@pytest.mark.parametrize("seed", range(3))
def test_eight_thousand_sequences_are_packed_tightly_evenly_and_fast(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(np.log(1000) - 0.5, 1.0, 8000)).astype(int).tolist()
    items, budget = items_of(lengths, group_size=8), 16_384
    elapsed = []
    for _ in range(3):
        begun = time.process_time()
        plan = plan_batch(0, items, 8, budget)
        elapsed.append(time.process_time() - begun)
    loads = [sum(batch.num_tokens for batch in rank.micro_batches) for rank in plan.ranks]
    places = sum(max(budget, batch.num_tokens) for rank in plan.ranks for batch in rank.micro_batches)
    assert sum(lengths) / places >= 0.96
    assert max(loads) / (sum(loads) / 8) <= 1.01
    assert min(elapsed) < 0.1
    whole = plan_batch(0, items, 8, budget, whole_groups=True)
    loads = [sum(batch.num_tokens for batch in rank.micro_batches) for rank in whole.ranks]
    assert max(loads) / (sum(loads) / 8) <= 1.05
