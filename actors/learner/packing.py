"""Records to micro-batches: variable-length sequences laid end to end (numpy only).

Masks come from what was recorded, never from a search for end or padding ids, and ids are used as they were sampled.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.engine.errors import InputError
from headrace.engine.types import MicroBatch, MicroBatchPlan, StepBatch, Trajectory

Scalar = TypeVar("Scalar", bound=np.generic)


class RankBatch(Protocol):
    """One rank's share of a step's plan, with the counts over all ranks."""

    @property
    def micro_batches(self) -> Sequence[MicroBatchPlan]: ...

    @property
    def num_loss_tokens(self) -> int: ...

    @property
    def num_sequences(self) -> int: ...

    @property
    def num_groups(self) -> int: ...


def build_step_batch(
    *, step: int, plan: RankBatch, trajectories: Mapping[str, Trajectory], advantages: Mapping[str, float]
) -> StepBatch:
    """Pack a rank's records as its plan says.

    Args:
        step: The step that trains on them.
        plan: Which records go into which micro-batch.
        trajectories: By record id.
        advantages: Scalar credit by record id.

    Raises:
        InputError: The plan names a record that is not there, has no credit or cannot be trained on.
    """
    wanted = [record_id for micro_batch in plan.micro_batches for record_id in micro_batch.record_ids]
    missing = [name for name in wanted if name not in trajectories or name not in advantages]
    if missing:
        raise InputError(f"the plan of step {step} names {missing[0]!r}, which has no record or no advantage here")
    return StepBatch(
        step=step,
        micro_batches=tuple(
            build_micro_batch(
                [trajectories[name] for name in micro_batch.record_ids],
                [advantages[name] for name in micro_batch.record_ids],
                step,
                shared=micro_batch.shared,
            )
            for micro_batch in plan.micro_batches
        ),
        num_loss_tokens=plan.num_loss_tokens,
        num_sequences=plan.num_sequences,
        num_groups=plan.num_groups,
    )


def build_micro_batch(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], step: int, *, shared: Sequence[int] = ()
) -> MicroBatch:
    """Lay sequences end to end; see `MicroBatch` for the alignment.

    No trajectories give a padding micro-batch: one token, no loss, so that each rank runs the same number of passes.

    Args:
        trajectories: S records, each with a prompt of at least one token.
        advantages: S scalars; each is spread over its record's loss tokens.
        step: The step that trains on them, for the lags.
        shared: Sizes of consecutive sharing units, as in `MicroBatchPlan`. A unit whose prompts are not the same is
            divided, for the plan knows their lengths alone.

    Raises:
        InputError: The counts differ, the units do not add up to the records, or a record cannot be trained on; names
            the record.
    """
    if len(trajectories) != len(advantages):
        raise InputError(f"{len(trajectories)} records and {len(advantages)} advantages: give one advantage a record")
    if shared and (min(shared) < 1 or sum(shared) != len(trajectories)):
        raise InputError(f"sharing units of {list(shared)} records do not add up to {len(trajectories)} records")
    if not trajectories:
        return _padding_micro_batch()
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        _check(trajectory, advantage)
    lengths = [t.prompt_token_ids.size + t.response_token_ids.size for t in trajectories]
    masks = [_with_prompt(t, (t.loss_mask != 0).astype(np.uint8)) for t in trajectories]
    mask = np.concatenate(masks)
    behaviour = np.concatenate([_with_prompt(t, t.logprobs.astype(np.float32)) for t in trajectories])
    spread = np.repeat(np.asarray(advantages, dtype=np.float32), lengths)
    return MicroBatch(
        token_ids=np.concatenate(
            [part for t in trajectories for part in (t.prompt_token_ids, t.response_token_ids)]
        ).astype(np.int32),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        sequence_ids=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask != 0, behaviour, np.float32(0.0)),
        advantages=np.where(mask != 0, spread, np.float32(0.0)),
        temperature=np.array([t.temperature for t in trajectories], dtype=np.float32),
        record_ids=tuple(t.record_id for t in trajectories),
        lags=np.array([step - t.oldest_version.version for t in trajectories], dtype=np.int32),
        group_ids=_numbered([t.group_id for t in trajectories]),
        shared=_of_equal_prompts(trajectories, shared),
    )


def in_input_order(
    record_ids: Sequence[str],
    micro_batches: Iterable[MicroBatch],
    values: Iterable[npt.NDArray[Scalar]],
) -> list[npt.NDArray[Scalar]]:
    """Per-token results of micro-batches, as one array a record in the order of the batch; padding is left out.

    Args:
        record_ids: The order that is wanted.
        micro_batches: In the order in which they ran, of one rank or of several.
        values: For each micro-batch an array [N] over its tokens.

    Returns:
        For each record its values [prompt and response tokens].

    Raises:
        InputError: A record is in none of the micro-batches or in two, or an array has not one value a token.
    """
    found: dict[str, npt.NDArray[Scalar]] = {}
    for micro_batch, column in zip(micro_batches, values, strict=True):
        if column.shape != micro_batch.token_ids.shape:
            raise InputError(f"values of shape {column.shape} came for {micro_batch.token_ids.size} tokens: give [N]")
        starts = np.flatnonzero(micro_batch.position_ids == 0)[1:]
        for name, part in zip(micro_batch.record_ids, np.split(column, starts), strict=True):
            if name in found:
                raise InputError(f"record {name!r} is in two micro-batches: its results would be ambiguous")
            if name:  # padding has no name
                found[name] = part
    missing = [name for name in record_ids if name not in found]
    if missing:
        raise InputError(f"{len(missing)} records have no result, {missing[0]!r} is the first: run all micro-batches")
    return [found[name] for name in record_ids]


def _numbered(names: Sequence[str]) -> npt.NDArray[np.int32]:
    """Each name as a number from 0, in order of first appearance."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int32)


def _of_equal_prompts(trajectories: Sequence[Trajectory], shared: Sequence[int]) -> tuple[int, ...]:
    """Sizes of sharing units, divided wherever a prompt is not the one before it."""
    sizes: list[int] = []
    start = 0
    for size in shared:
        sizes.append(1)
        for before, trajectory in pairwise(trajectories[start : start + size]):
            if np.array_equal(before.prompt_token_ids, trajectory.prompt_token_ids):
                sizes[-1] += 1
            else:
                sizes.append(1)
        start += size
    return tuple(sizes)


def _padding_micro_batch() -> MicroBatch:
    nothing = np.zeros(1, dtype=np.int32)
    return MicroBatch(
        token_ids=nothing,
        position_ids=nothing,
        sequence_ids=nothing,
        loss_mask=np.zeros(1, dtype=np.uint8),
        behaviour_logprobs=np.zeros(1, dtype=np.float32),
        advantages=np.zeros(1, dtype=np.float32),
        temperature=np.ones(1, dtype=np.float32),
        record_ids=("",),
        lags=nothing,
    )


def _check(trajectory: Trajectory, advantage: float) -> None:
    name, size = trajectory.record_id, trajectory.response_token_ids.size
    if trajectory.prompt_token_ids.size == 0:
        raise InputError(f"record {name!r} has an empty prompt: its first token would have nothing to be scored from")
    if trajectory.logprobs.size != size or trajectory.loss_mask.size != size:
        raise InputError(
            f"record {name!r} has {size} response tokens, {trajectory.logprobs.size} log-probabilities and "
            f"{trajectory.loss_mask.size} mask entries: the three must agree"
        )
    if not np.isfinite(trajectory.logprobs[trajectory.loss_mask != 0]).all():
        raise InputError(f"record {name!r} has a log-probability that is not finite on a loss token: drop the record")
    if not np.isfinite(advantage):
        raise InputError(f"record {name!r} has the advantage {advantage}: it must be finite")
    if not trajectory.temperature > 0:
        raise InputError(
            f"record {name!r} was sampled at temperature {trajectory.temperature}: greedy samples cannot train"
        )


def _with_prompt(trajectory: Trajectory, column: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """A response column with zeros in front for the prompt."""
    return np.concatenate([np.zeros(trajectory.prompt_token_ids.size, dtype=column.dtype), column])
