"""Which record goes to which rank and micro-batch.

Two passes. Records are dealt to ranks longest first, each to the rank with the fewest tokens (Graham, "Bounds on
multiprocessing timing anomalies", 1969), so that all ranks have the same work. Each rank then packs its own records by
best fit, longest first. On 8,000 records this comes within a few tokens of an even split, in milliseconds.

Where records belong together, what is dealt and packed is not the single record:

    unit    records that share one copy of their prompt (`prompt_sharing.py`); else one record
    piece   goes into one micro-batch: a unit; with whole groups, all units of a group that fit into the budget together
    bundle  goes to one rank: a piece; with whole groups, all pieces of a group

Invariants:
- Every record appears exactly once, whole.
- A micro-batch is over the budget only if it holds a single record, which is.
- Every rank runs the same number of micro-batches, in order of falling size, because each is a collective: what the
  ranks do at the same time is then about as long. A rank with fewer gets empty padding micro-batches at the end.
"""

import heapq
from collections import Counter
from collections.abc import Sequence

from headrace.engine.errors import InputError
from headrace.engine.scheduling.best_fit import best_fit
from headrace.engine.scheduling.prompt_sharing import PlanItem, PromptSharing, Unit
from headrace.engine.types import BatchPlan, MicroBatchPlan, RankPlan

__all__ = ["PlanItem", "plan_batch"]


_Units = list[Unit]


def plan_batch(
    step: int,
    items: Sequence[PlanItem],
    num_ranks: int,
    token_budget: int,
    *,
    whole_groups: bool = False,
    share_prompts: bool = False,
    hidden_size: int | None = None,
) -> BatchPlan:
    """Divide a batch among ranks and micro-batches. The same arguments give the same plan.

    Every record appears exactly once, whole. A record longer than the budget gets a micro-batch of its own; no other
    micro-batch is over the budget. Records in a micro-batch keep the order of `items`; with `share_prompts` those that
    share stand together, in the order of `items`, and the first of each unit decides the order of units. Results belong
    to the names in `MicroBatchPlan.record_ids`; `in_input_order` of the learner's packing puts them back.

    Args:
        step: The step that trains on the batch.
        items: The records; the order breaks ties. None at all gives ranks without micro-batches.
        num_ranks: Learner ranks.
        token_budget: Most tokens in a micro-batch.
        whole_groups: All records of a group go to one rank, and into one micro-batch if they fit into the budget; a
            larger group takes as few micro-batches of its rank as best fit finds. For algorithms that compare the
            tokens of a group: they see one micro-batch at a time, and add up over those of a rank without a collective.
            Costs use of the budget, and leaves ranks idle where there are fewer groups than ranks.
        share_prompts: A micro-batch holds the prompt of a group once, and the budget counts it once. Records of a group
            stay in one micro-batch if they fit; without `whole_groups` a group is divided between ranks where one would
            otherwise have more than 1% above the mean. Only for a model that can share: others compute each prompt.
        hidden_size: Of the model, with `share_prompts`: prompts are shared only as far as that makes the pass cheaper,
            for attention over a shared row grows with the square of its width. None: as far as the budget allows.

    Raises:
        InputError: A number is below 1, a record appears twice, or a count is out of its range.
    """
    _check(items, num_ranks, token_budget, hidden_size)
    sharing = PromptSharing(items, token_budget, hidden_size) if share_prompts else None
    units = sharing.cut(range(len(items))) if sharing else [Unit((i,), item.num_tokens) for i, item in enumerate(items)]
    if whole_groups:
        packed = _pack_groups(items, units, num_ranks, token_budget)
    else:
        packed = _pack_units(units, num_ranks, token_budget, sharing)
    num_micro_batches = max(len(micro_batches) for micro_batches in packed)
    padding = MicroBatchPlan(record_ids=(), num_tokens=0)
    return BatchPlan(
        step=step,
        ranks=tuple(
            RankPlan(
                micro_batches=tuple(_micro_batch_plan(items, units, share_prompts) for units in micro_batches)
                + (padding,) * (num_micro_batches - len(micro_batches))
            )
            for micro_batches in packed
        ),
        num_loss_tokens=sum(item.num_loss_tokens for item in items),
        num_sequences=sum(item.num_loss_tokens > 0 for item in items),
        num_groups=len({item.group_id for item in items}),
    )


def _check(items: Sequence[PlanItem], num_ranks: int, token_budget: int, hidden_size: int | None) -> None:
    if num_ranks < 1 or token_budget < 1:
        raise InputError(f"num_ranks {num_ranks} and token_budget {token_budget} were given; both must be at least 1")
    if hidden_size is not None and hidden_size < 1:
        raise InputError(f"hidden_size {hidden_size} was given; it must be at least 1, or None where it is not known")
    if len({item.record_id for item in items}) < len(items):
        name = Counter(item.record_id for item in items).most_common(1)[0][0]
        raise InputError(f"record {name!r} is in the batch twice; give each record once")
    for item in items:
        if item.num_tokens < 1 or not 0 <= item.num_loss_tokens <= item.num_tokens:
            raise InputError(
                f"record {item.record_id!r} has {item.num_tokens} tokens and {item.num_loss_tokens} in the loss; "
                "the first must be at least 1, and the second between 0 and the first"
            )
        if not 0 <= item.num_prompt_tokens <= item.num_tokens:
            raise InputError(
                f"record {item.record_id!r} has {item.num_tokens} tokens, {item.num_prompt_tokens} of them in the "
                "prompt; these must be between 0 and all of them"
            )


def _pack_units(
    units: Sequence[Unit], num_ranks: int, token_budget: int, sharing: PromptSharing | None
) -> list[list[_Units]]:
    """For each rank its micro-batches, where each unit is on its own."""
    shares = [[units[position] for position in dealt] for dealt in _deal([unit.tokens for unit in units], num_ranks)]
    if sharing is not None:
        shares = sharing.level(shares)
    return [
        [[share[position] for position in positions] for positions in _pack([u.tokens for u in share], token_budget)]
        for share in shares
    ]


def _pack_groups(
    items: Sequence[PlanItem], units: Sequence[Unit], num_ranks: int, token_budget: int
) -> list[list[_Units]]:
    """For each rank its micro-batches, where groups stay together."""
    bundles = _bundles(items, units, token_budget)
    sizes = [[sum(unit.tokens for unit in piece) for piece in bundle] for bundle in bundles]
    packed: list[list[_Units]] = []
    for dealt in _deal([sum(pieces) for pieces in sizes], num_ranks):
        pieces = [piece for bundle in dealt for piece in bundles[bundle]]
        bins = _pack([size for bundle in dealt for size in sizes[bundle]], token_budget)
        packed.append([[unit for position in positions for unit in pieces[position]] for positions in bins])
    return packed


def _bundles(items: Sequence[PlanItem], units: Sequence[Unit], token_budget: int) -> list[list[_Units]]:
    """For each group its pieces: units together as far as they fit into a micro-batch."""
    groups: dict[str, list[Unit]] = {}
    for unit in units:
        groups.setdefault(items[unit.indices[0]].group_id, []).append(unit)
    return [
        [[group[position] for position in positions] for positions in best_fit([u.tokens for u in group], token_budget)]
        for group in groups.values()
    ]


def _deal(sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Positions in `sizes` for each rank: the largest first, each to the rank that has the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for position in sorted(range(len(sizes)), key=lambda position: -sizes[position]):
        load, rank = loads[0]
        shares[rank].append(position)
        heapq.heapreplace(loads, (load + sizes[position], rank))
    return shares


def _pack(sizes: Sequence[int], token_budget: int) -> list[list[int]]:
    """Positions in `sizes` for each micro-batch, most tokens first."""
    bins = best_fit(sizes, token_budget)
    return sorted(bins, key=lambda positions: -sum([sizes[position] for position in positions]))


def _micro_batch_plan(items: Sequence[PlanItem], units: Sequence[Unit], share_prompts: bool) -> MicroBatchPlan:
    in_order = sorted(units)
    return MicroBatchPlan(
        record_ids=tuple([items[index].record_id for unit in in_order for index in unit.indices]),
        num_tokens=sum([unit.tokens for unit in in_order]),
        shared=tuple([len(unit.indices) for unit in in_order]) if share_prompts else (),
    )
