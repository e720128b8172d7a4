"""Which record goes to which rank and micro-batch.

Two passes. Records are dealt to ranks longest first, each to the rank with the fewest tokens (Graham, "Bounds on
multiprocessing timing anomalies", 1969), so that all ranks have the same work. Each rank then packs its own records,
longest first, each into the fullest micro-batch that still holds it (best-fit decreasing: at most 11/9 of the least
number of micro-batches plus one; Johnson et al., 1974).

Every rank runs the same number of micro-batches, in order of falling size, because each is a collective: what the ranks
do at the same time is then about as long. A rank with fewer gets empty padding micro-batches at the end.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.errors import InputError
from headrace.engine.types import BatchPlan, MicroBatchPlan, RankPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanItem:
    """One record of the batch.

    Attributes:
        num_tokens: Prompt and response; at least 1.
        num_loss_tokens: Sum of the loss mask; 0 is allowed.
    """

    record_id: str
    group_id: str
    num_tokens: int
    num_loss_tokens: int


def plan_batch(step: int, items: Sequence[PlanItem], num_ranks: int, token_budget: int) -> BatchPlan:
    """Divide a batch among ranks and micro-batches. The same arguments give the same plan.

    Every record appears exactly once, whole. A record longer than the budget gets a micro-batch of its own; no other
    micro-batch is over the budget. Records in a micro-batch keep the order of `items`.

    Args:
        step: The step that trains on the batch.
        items: The records; the order breaks ties. None at all gives ranks without micro-batches.
        num_ranks: Learner ranks.
        token_budget: Most tokens in a micro-batch.

    Raises:
        InputError: `num_ranks` or `token_budget` is below 1, a record appears twice, or a count is out of its range.
    """
    _check(items, num_ranks, token_budget)
    longest_first = sorted(range(len(items)), key=lambda index: (-items[index].num_tokens, index))
    lengths = [item.num_tokens for item in items]
    packed = [_pack(lengths, share, token_budget) for share in _deal(lengths, longest_first, num_ranks)]
    num_micro_batches = max(len(micro_batches) for micro_batches in packed)
    return BatchPlan(
        step=step,
        ranks=tuple(_rank_plan(items, micro_batches, num_micro_batches) for micro_batches in packed),
        num_loss_tokens=sum(item.num_loss_tokens for item in items),
        num_sequences=sum(item.num_loss_tokens > 0 for item in items),
        num_groups=len({item.group_id for item in items}),
    )


def _check(items: Sequence[PlanItem], num_ranks: int, token_budget: int) -> None:
    if num_ranks < 1 or token_budget < 1:
        raise InputError(f"num_ranks {num_ranks} and token_budget {token_budget} were given; both must be at least 1")
    seen: set[str] = set()
    for item in items:
        if item.record_id in seen:
            raise InputError(f"record {item.record_id!r} is in the batch twice; give each record once")
        seen.add(item.record_id)
        if item.num_tokens < 1 or not 0 <= item.num_loss_tokens <= item.num_tokens:
            raise InputError(
                f"record {item.record_id!r} has {item.num_tokens} tokens and {item.num_loss_tokens} in the loss; "
                "the first must be at least 1, and the second between 0 and the first"
            )


def _deal(lengths: Sequence[int], longest_first: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Positions for each rank, longest first; each goes to the rank that has the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in longest_first:
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + lengths[index], rank))
    return shares


def _pack(lengths: Sequence[int], share: Sequence[int], token_budget: int) -> list[list[int]]:
    """Micro-batches of positions, most tokens first. `share` is longest first."""
    micro_batches: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens that still fit, micro-batch), sorted
    for index in share:
        length = lengths[index]
        place = bisect_left(room, (length, -1))
        if place < len(room):
            left, micro_batch = room.pop(place)
            micro_batches[micro_batch].append(index)
        else:
            left, micro_batch = token_budget, len(micro_batches)
            micro_batches.append([index])
        if left > length:
            insort(room, (left - length, micro_batch))
    micro_batches.sort(key=lambda indices: (-sum(lengths[index] for index in indices), indices[0]))
    return micro_batches


def _rank_plan(items: Sequence[PlanItem], micro_batches: list[list[int]], num_micro_batches: int) -> RankPlan:
    plans = [
        MicroBatchPlan(
            record_ids=tuple(items[index].record_id for index in sorted(indices)),
            num_tokens=sum(items[index].num_tokens for index in indices),
        )
        for indices in micro_batches
    ]
    padding = MicroBatchPlan(record_ids=(), num_tokens=0)
    return RankPlan(micro_batches=tuple(plans) + (padding,) * (num_micro_batches - len(plans)))
