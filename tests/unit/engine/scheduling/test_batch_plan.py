import itertools
import time
from collections import Counter

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
