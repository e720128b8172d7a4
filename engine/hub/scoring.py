"""From the records of a generated group to its columns.

Invariants:
- A sample without a value is never scored 0 in silence: it is imputed by name, or its whole group goes.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from headrace.engine.config.schema import RewardConfig
from headrace.engine.errors import RewardError
from headrace.engine.hub.credit import Credit, encode_credit
from headrace.engine.records import decode_trajectory, encode_column
from headrace.engine.types import RewardOutcome, RewardSample, RewardStatus, Trajectory
from headrace.engine.types.records import RecordHeader


class Stored(Protocol):
    """A record as the table holds it."""

    @property
    def header(self) -> RecordHeader: ...

    @property
    def data(self) -> bytes: ...


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done with a group after scoring.

    Attributes:
        values: One reward a sample, or None when the group cannot be used.
        failed: Samples that got no value.
        why: With None, or with imputed values: the first failure in words.
    """

    values: tuple[float, ...] | None
    failed: int = 0
    why: str = ""


def judge(outcomes: Sequence[RewardOutcome], config: RewardConfig) -> Judgement:
    """Apply `reward.on_failure` to the outcomes of one group.

    Raises:
        RewardError: A sample got no value and `reward.on_failure` is "fail".
    """
    bad = [outcome for outcome in outcomes if outcome.status is not RewardStatus.OK]
    if not bad:
        return Judgement(values=tuple(outcome.value for outcome in outcomes))
    first = bad[0]
    why = f"sample {first.sample_id} got no reward: {first.status.name} {first.message}".rstrip()
    if config.on_failure == "fail":
        raise RewardError(f'{why}; mend the scorer, or set reward.on_failure to "requeue", "drop" or "impute"')
    if config.on_failure == "impute":
        values = (o.value if o.status is RewardStatus.OK else config.impute_value for o in outcomes)
        return Judgement(values=tuple(values), failed=len(bad), why=why)
    return Judgement(values=None, failed=len(bad), why=why)


def reward_sample(trajectory: Trajectory) -> RewardSample:
    """What a scorer gets to see of a trajectory."""
    return RewardSample(
        sample_id=trajectory.record_id,
        group_id=trajectory.group_id,
        prompt_text=trajectory.prompt_text,
        response_text=trajectory.response_text,
        prompt_token_ids=tuple(trajectory.prompt_token_ids.tolist()),
        response_token_ids=tuple(trajectory.response_token_ids.tolist()),
        finish_reason=trajectory.finish_reason,
        data=trajectory.data,
    )


def samples_of(records: Sequence[Stored]) -> list[Trajectory]:
    """The decoded records, in order."""
    return [decode_trajectory(record.data) for record in records]


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """An encoded sidecar column."""

    record_id: str
    name: str
    data: bytes


def reward_columns(records: Sequence[Stored], values: Sequence[float]) -> list[Column]:
    """The `reward` column of each record: float64 scalar."""
    return [
        Column(
            record_id=record.header.record_id,
            name="reward",
            data=encode_column("reward", np.array(value, np.float64)),
        )
        for record, value in zip(records, values, strict=True)
    ]


def credit_columns(records: Sequence[Stored], credit: Credit) -> list[Column]:
    """The `advantage` column of each record of one whole group, from float32 [G]."""
    return [
        Column(record_id=record.header.record_id, name="advantage", data=encode_credit(float(advantage)))
        for record, advantage in zip(records, credit, strict=True)
    ]
