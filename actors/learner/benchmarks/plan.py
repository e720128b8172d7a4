"""The batch planner: how full its micro-batches are, how even its ranks, how long it takes (numpy only).

The batch: 8,000 records in groups of 8, lengths lognormal with mean 1,000 and sigma 1, not cut (a few are over the
budget); 8 ranks, a budget of 16,384 tokens. Each figure is the worst of three seeds.

    token_budget_use    tokens / places; a micro-batch has as many places as the budget, or as its single record where
                        that is longer. Padding micro-batches count in full.
    rank_max_over_mean  tokens of the fullest rank over the mean of the ranks
    plan_ms_8k          CPU time of planning, in ms, the best of five

Figures that begin with `first_come_` are of the simplest batching: each rank gets the next 1,000 records in the order
in which they came, and closes a micro-batch as soon as the next record does not fit. Figures that end in
`_whole_groups` are with all records of a group on one rank, and in one micro-batch where they fit.

Prompt sharing: the same responses behind prompts of 256 tokens.

    prompt_copies_per_group         micro-batches that hold records of a group, mean over groups: where the plan keeps
                                    no groups together, so often each prompt is computed at least
    prompt_copies_per_group_shared  the same, with shared prompts
    computed_tokens_shared          tokens computed with shared prompts, as a fraction of those without
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from headrace.engine.scheduling.batch_plan import PlanItem, plan_batch
from headrace.engine.types import BatchPlan

NUM_RECORDS = 8_000
GROUP_SIZE = 8
NUM_RANKS = 8
TOKEN_BUDGET = 16_384
NUM_PROMPT_TOKENS = 256
SEEDS = (0, 1, 2)
ROUNDS = 5

Made = TypeVar("Made")
_Sizes = Sequence[Sequence[int]]  # tokens of each micro-batch of each rank; 0 is padding


def figures() -> dict[str, float]:
    """Measure; takes a few seconds."""
    by_seed = [_figures(seed) for seed in SEEDS]
    names = by_seed[0]
    return {
        name: (min if "token_budget_use" in name else max)(measured[name] for measured in by_seed) for name in names
    }


def _figures(seed: int) -> dict[str, float]:
    items = _items(seed, num_prompt_tokens=0)
    plan, plan_ms = _timed(lambda: plan_batch(0, items, NUM_RANKS, TOKEN_BUDGET))
    whole, whole_ms = _timed(lambda: plan_batch(0, items, NUM_RANKS, TOKEN_BUDGET, whole_groups=True))
    first_come, first_come_ms = _timed(lambda: _first_come([item.num_tokens for item in items]))
    prompted = _items(seed, num_prompt_tokens=NUM_PROMPT_TOKENS)
    apart = plan_batch(0, prompted, NUM_RANKS, TOKEN_BUDGET)
    shared = plan_batch(0, prompted, NUM_RANKS, TOKEN_BUDGET, share_prompts=True)
    return {
        "token_budget_use": _use(_sizes(plan)),
        "first_come_token_budget_use": _use(first_come),
        "token_budget_use_whole_groups": _use(_sizes(whole)),
        "rank_max_over_mean": _unevenness(_sizes(plan)),
        "first_come_rank_max_over_mean": _unevenness(first_come),
        "rank_max_over_mean_whole_groups": _unevenness(_sizes(whole)),
        "plan_ms_8k": plan_ms,
        "first_come_plan_ms_8k": first_come_ms,
        "plan_ms_8k_whole_groups": whole_ms,
        "micro_batches_per_rank": float(len(plan.ranks[0].micro_batches)),
        "first_come_micro_batches_per_rank": float(len(first_come[0])),
        "prompt_copies_per_group": _copies_per_group(apart, prompted),
        "prompt_copies_per_group_shared": _copies_per_group(shared, prompted),
        "computed_tokens_shared": _num_tokens(_sizes(shared)) / _num_tokens(_sizes(apart)),
    }


def _items(seed: int, *, num_prompt_tokens: int) -> list[PlanItem]:
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(np.log(1000) - 0.5, 1.0, NUM_RECORDS).round()).astype(int).tolist()
    return [
        PlanItem(
            record_id=f"g{index // GROUP_SIZE}/{index % GROUP_SIZE}/0",
            group_id=f"g{index // GROUP_SIZE}",
            num_tokens=num_prompt_tokens + length,
            num_loss_tokens=length,
            num_prompt_tokens=num_prompt_tokens,
        )
        for index, length in enumerate(lengths)
    ]


def _first_come(lengths: Sequence[int]) -> list[list[int]]:
    """Tokens of each micro-batch of each rank, in the order of arrival."""
    per_rank = -(-len(lengths) // NUM_RANKS)
    ranks: list[list[int]] = []
    for start in range(0, len(lengths), per_rank):
        micro_batches = [0]
        for length in lengths[start : start + per_rank]:
            if micro_batches[-1] and micro_batches[-1] + length > TOKEN_BUDGET:
                micro_batches.append(0)
            micro_batches[-1] += length
        ranks.append(micro_batches)
    most = max(len(micro_batches) for micro_batches in ranks)
    return [micro_batches + [0] * (most - len(micro_batches)) for micro_batches in ranks]


def _timed(work: Callable[[], Made]) -> tuple[Made, float]:
    """The result and the shortest CPU time in ms; other load of the machine does not count."""
    took_s: list[float] = []
    for _ in range(ROUNDS):
        begun_s = time.process_time()
        work()
        took_s.append(time.process_time() - begun_s)
    return work(), min(took_s) * 1e3


def _sizes(plan: BatchPlan) -> _Sizes:
    return [[micro_batch.num_tokens for micro_batch in rank.micro_batches] for rank in plan.ranks]


def _num_tokens(sizes: _Sizes) -> int:
    return sum(sum(rank) for rank in sizes)


def _use(sizes: _Sizes) -> float:
    return _num_tokens(sizes) / sum(max(TOKEN_BUDGET, tokens) for rank in sizes for tokens in rank)


def _unevenness(sizes: _Sizes) -> float:
    return max(sum(rank) for rank in sizes) * len(sizes) / _num_tokens(sizes)


def _copies_per_group(plan: BatchPlan, items: Sequence[PlanItem]) -> float:
    groups = {item.record_id: item.group_id for item in items}
    micro_batches = [micro_batch for rank in plan.ranks for micro_batch in rank.micro_batches]
    return sum(len({groups[name] for name in m.record_ids}) for m in micro_batches) / len(set(groups.values()))
