"""From raw rewards to credit, and from a lease to the batch that is trained on. Pure.

Invariants:
- Credit is assigned to whole groups, keyed by group id, from shaped rewards; the scorer's raw values stay as they are.
- Every sample of a lease counts in the batch's totals, also those that take no forward pass.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engine.config import Config
from headrace.engine.errors import InputError
from headrace.engine.interfaces import Algorithm
from headrace.engine.records import decode_column, decode_trajectory, encode_column
from headrace.engine.scheduling.batch_plan import PlanItem, plan_batch
from headrace.engine.types import BatchPlan, MicroBatchPlan, RankPlan, Trajectory
from headrace.engine.types.records import RecordHeader

Credit = npt.NDArray[np.float32]


class StoredColumns(Protocol):
    """A record with its sidecar columns."""

    @property
    def header(self) -> RecordHeader: ...

    @property
    def data(self) -> bytes: ...

    @property
    def columns(self) -> Mapping[str, bytes]: ...


class ScoredRewards(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The rewards of one whole group, as credit assignment sees them: rewards float64 [G], lengths int64 [G]."""

    group_id: str
    rewards: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample of a batch.

    Attributes:
        score: The scorer's raw value.
        reward: The shaped reward that credit was assigned from.
        advantage: The scalar credit.
    """

    trajectory: Trajectory
    score: float
    reward: float
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedRecord:
    """A record as the learner gets it: with its advantage, wherever that was worked out."""

    header: RecordHeader
    data: bytes
    columns: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The leased batch of a step, for all ranks.

    Attributes:
        records: By record id; every record that the plan names.
        samples: Every sample of the batch, also those that take no forward pass.
    """

    lease_token: int
    plan: BatchPlan
    records: Mapping[str, LeasedRecord]
    mean_lag: float
    max_lag: int
    samples: Sequence[Sample]

    @property
    def num_without_credit(self) -> int:
        """Groups that teach nothing, whether or not their samples take a forward pass."""
        groups = {sample.trajectory.group_id for sample in self.samples}
        return len(groups - {sample.trajectory.group_id for sample in self.samples if sample.advantage})


def raw_rewards(headers: Sequence[RecordHeader], values: Sequence[float]) -> ScoredRewards:
    """One whole group with the scorer's values."""
    return ScoredRewards(
        group_id=headers[0].group_id,
        rewards=np.array(values, np.float64),
        lengths=np.array([header.num_response_tokens for header in headers], np.int64),
    )


def shaped_rewards(group: ScoredRewards, algorithm: Algorithm) -> ScoredRewards:
    """The group with the rewards that credit is assigned from.

    Raises:
        InputError: The algorithm does not take these rewards.
    """
    shaped = algorithm.shape_rewards(group)
    assert shaped.shape == group.rewards.shape, "an algorithm shapes each reward into one number"
    return msgspec.structs.replace(group, rewards=shaped)


def assign_credit(shaped: Sequence[ScoredRewards], algorithm: Algorithm) -> list[Credit]:
    """The credit of each whole group, float32 [G], from shaped rewards.

    Raises:
        InputError: The algorithm does not take these rewards.
    """
    credit = algorithm.assign_credit(shaped)
    assert [c.shape for c in credit] == [g.rewards.shape for g in shaped], "an algorithm gives one number a sample"
    return credit


def columns_before_lease(algorithm: Algorithm) -> tuple[str, ...]:
    """What a record needs before it can be leased; credit of a whole batch is assigned with the lease."""
    return ("reward", "advantage") if algorithm.traits.credit_scope == "group" else ("reward",)


def encode_credit(credit: float) -> bytes:
    """The `advantage` column of one record: float32 scalar."""
    return encode_column("advantage", np.array(credit, np.float32))


def build_batch(
    groups: Sequence[Sequence[StoredColumns]],
    *,
    step: int,
    lease_token: int,
    config: Config,
    algorithm: Algorithm,
    sharing_hidden_size: int = 0,
) -> Batch:
    """Divide the groups of a lease among ranks; credit that needs the whole batch is assigned here.

    Args:
        groups: The records of each group.
        step: The step that trains on them.
        lease_token: Of the lease.
        config: The run's.
        algorithm: Shapes rewards; assigns the credit of a batch.
        sharing_hidden_size: Of a trainer's model that computes the prompt of a group once; 0: it cannot.

    Raises:
        InputError: The algorithm does not take the rewards of the batch, or needs a group in one micro-batch that is
            larger than `learner.token_budget`.
    """
    traits = algorithm.traits
    raw = [raw_rewards([r.header for r in group], [_scalar(r.columns["reward"]) for r in group]) for group in groups]
    shaped = [shaped_rewards(group, algorithm) for group in raw]
    if traits.credit_scope == "batch":
        credit = assign_credit(shaped, algorithm)
    else:
        credit = [np.array([_scalar(r.columns["advantage"]) for r in group], np.float32) for group in groups]
    samples: list[Sample] = []
    kept: list[LeasedRecord] = []
    for group, scores, rewards, advantages in zip(groups, raw, shaped, credit, strict=True):
        for index, record in enumerate(group):
            advantage = float(advantages[index])
            samples.append(
                Sample(
                    trajectory=decode_trajectory(record.data),
                    score=float(scores.rewards[index]),
                    reward=float(rewards.rewards[index]),
                    advantage=advantage,
                )
            )
            if advantage != 0.0 or not traits.skips_zero_credit:
                columns = {**record.columns, "advantage": encode_credit(advantage)}
                kept.append(LeasedRecord(header=record.header, data=record.data, columns=columns))
    headers = [record.header for group in groups for record in group]
    lags = [step - header.oldest_version.version for header in headers]
    items = [_plan_item(record.header) for record in kept]
    plan = plan_batch(
        step,
        items,
        config.learner.num_ranks,
        config.learner.token_budget,
        whole_groups=traits.whole_groups,
        share_prompts=sharing_hidden_size > 0,
        hidden_size=sharing_hidden_size or None,
    )
    if traits.whole_groups:
        _refuse_divided(plan, items, config)
    return Batch(
        lease_token=lease_token,
        plan=BatchPlan(
            step=step,
            ranks=plan.ranks if kept else _padding(config.learner.num_ranks),
            num_loss_tokens=sum(header.num_loss_tokens for header in headers),
            num_sequences=sum(header.num_loss_tokens > 0 for header in headers),
            num_groups=len(groups),
        ),
        records={record.header.record_id: record for record in kept},
        mean_lag=sum(lags) / len(lags),
        max_lag=max(lags),
        samples=samples,
    )


def _plan_item(header: RecordHeader) -> PlanItem:
    return PlanItem(
        record_id=header.record_id,
        group_id=header.group_id,
        num_tokens=header.num_prompt_tokens + header.num_response_tokens,
        num_loss_tokens=header.num_loss_tokens,
        num_prompt_tokens=header.num_prompt_tokens,
    )


def _refuse_divided(plan: BatchPlan, items: Sequence[PlanItem], config: Config) -> None:
    """A loss over whole groups would take a part of one for the whole."""
    groups = {item.record_id: item.group_id for item in items}
    micro_batches = [part for rank in plan.ranks for part in rank.micro_batches]
    seen = Counter(name for part in micro_batches for name in {groups[record] for record in part.record_ids})
    divided = [name for name, count in seen.items() if count > 1]
    if divided:
        size = sum(item.num_tokens for item in items if item.group_id == divided[0])
        raise InputError(
            f'group {divided[0]!r} has {size} tokens and algorithm.name = "{config.algorithm.name}" needs it in one '
            f"micro-batch, but learner.token_budget = {config.learner.token_budget}: raise it to at least {size}"
        )


def _padding(num_ranks: int) -> tuple[RankPlan, ...]:
    """A step in which no sample has an advantage still runs one pass on every rank."""
    return (RankPlan(micro_batches=(MicroBatchPlan(record_ids=(), num_tokens=0),)),) * num_ranks


def _scalar(column: bytes) -> float:
    _, value = decode_column(column)
    return float(value)
