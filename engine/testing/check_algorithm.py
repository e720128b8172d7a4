"""Conformance of an `Algorithm`. No tensor library is imported: the caller hands in the loss's inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engine.errors import InputError
from headrace.engine.interfaces import Algorithm, LossInputs, LossOutput
from headrace.engine.testing.check_trainer import make_micro_batch
from headrace.engine.testing.expect import expect, expect_error
from headrace.engine.types import AlgorithmTraits, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """A `GroupRewards` for tests: rewards float64 [G], lengths int64 [G]."""

    group_id: str
    rewards: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]


def make_group(rewards: Sequence[float], group_id: str = "g", *, lengths: Sequence[int] | None = None) -> SampleGroup:
    """A group with read-only rewards and lengths, by default 3, 4, 5, ..."""
    values = np.array(rewards, np.float64)
    counts = np.arange(3, 3 + values.size, dtype=np.int64) if lengths is None else np.array(lengths, np.int64)
    values.flags.writeable = False
    counts.flags.writeable = False
    return SampleGroup(group_id=group_id, rewards=values, lengths=counts)


def check_algorithm(
    factory: Callable[[], Algorithm],
    *,
    make_loss_inputs: Callable[[], LossInputs] | None = None,
    micro_batch: MicroBatch | None = None,
) -> None:
    """Run every rule of `Algorithm` against one method.

    Args:
        factory: Makes the algorithm; called twice.
        make_loss_inputs: Equal inputs at each call, with a fresh graph; None leaves out the loss.
        micro_batch: For `token_advantages`; the default has two sequences and the columns that the traits name.

    Raises:
        AssertionError: With one sentence on the first rule that is broken.
    """
    algorithm, other = factory(), factory()
    generator_before = _global_generator()
    traits = algorithm.traits
    expect(traits == algorithm.traits == other.traits, "traits must be the same for the whole run")
    groups = _sample_groups(traits)
    _check_shaping(algorithm, groups)
    _check_filter(algorithm, groups)
    _check_credit(algorithm, other, groups)
    _check_credit_scope(algorithm, groups)
    _check_token_advantages(algorithm, micro_batch or _with_columns(make_micro_batch(), traits))
    if make_loss_inputs is not None:
        _check_loss(algorithm, make_loss_inputs)
    expect(_global_generator() == generator_before, "an algorithm must not use numpy's global generator")


def _global_generator() -> tuple[bytes, int]:
    state: Any = np.random.get_state(legacy=False)
    return state["state"]["key"].tobytes(), state["state"]["pos"]


def _sample_groups(traits: AlgorithmTraits) -> list[SampleGroup]:
    if traits.trains_on == "preference_pairs":
        return [make_group([1.0, 0.0], "a"), make_group([0.25, 0.75], "b")]
    return [make_group([1.0, 0.0, 0.0, 0.5], "a"), make_group([0.25, 0.75], "b"), make_group([1.0, 1.0, 1.0], "c")]


def _with_columns(micro_batch: MicroBatch, traits: AlgorithmTraits) -> MicroBatch:
    """The micro-batch with what the traits ask for; its two sequences are one group."""
    mask = micro_batch.loss_mask != 0
    columns = {name: np.where(mask, np.float32(-1.25), np.float32(0)) for name in traits.columns}
    return msgspec.structs.replace(micro_batch, group_ids=np.zeros(len(micro_batch.record_ids), np.int32), **columns)


_BAD_GROUPS = (
    ("a NaN", make_group([1.0, float("nan")])),
    ("an infinite reward", make_group([float("inf"), 0.0])),
    ("no reward", make_group([])),
)


def _check_shaping(algorithm: Algorithm, groups: Sequence[SampleGroup]) -> None:
    for group in groups:
        shaped = algorithm.shape_rewards(group)
        expect(shaped.dtype == np.float64, "shape_rewards() must be float64")
        expect(shaped.shape == group.rewards.shape, "shape_rewards() must have one value a sample: [G]")
        expect(bool(np.isfinite(shaped).all()), "shape_rewards() of finite rewards must be finite")
        again = algorithm.shape_rewards(group)
        expect(np.array_equal(shaped, again), "shape_rewards() must be pure: equal groups give equal rewards")
    for name, bad in _BAD_GROUPS:
        sentence = f"shape_rewards() of a group with {name} must raise InputError"
        expect_error(InputError, partial(algorithm.shape_rewards, bad), sentence)


def _check_filter(algorithm: Algorithm, groups: Sequence[SampleGroup]) -> None:
    for group in groups:
        kept = algorithm.keeps(group)
        expect(type(kept) is bool, "keeps() must be a bool")
        expect(kept or algorithm.traits.filters_groups, "keeps() refused a group, but traits.filters_groups is False")
        longer = make_group(group.rewards.tolist(), group.group_id, lengths=(group.lengths * 7).tolist())
        expect(algorithm.keeps(longer) == kept, "keeps() must go by the raw rewards, not by the lengths")


def _check_credit(algorithm: Algorithm, other: Algorithm, groups: Sequence[SampleGroup]) -> None:
    credit = algorithm.assign_credit(groups)
    expect(len(credit) == len(groups), "assign_credit() must give one array a group, in order")
    for group, values in zip(groups, credit, strict=True):
        expect(values.dtype == np.float32, f"the credit of group {group.group_id} must be float32")
        expect(values.shape == group.rewards.shape, f"the credit of group {group.group_id} must have shape [G]")
        expect(bool(np.isfinite(values).all()), f"the credit of group {group.group_id} must be finite")
    for repeat in (algorithm.assign_credit(groups), other.assign_credit(groups)):
        same = all(np.array_equal(a, b) for a, b in zip(credit, repeat, strict=True))
        expect(same, "assign_credit() must be pure: equal groups give equal credit")
    expect(algorithm.assign_credit([]) == [], "assign_credit([]) must give no array")
    for name, bad in _BAD_GROUPS:
        sentence = f"assign_credit() of a group with {name} must raise InputError"
        expect_error(InputError, partial(algorithm.assign_credit, [bad]), sentence)


def _check_credit_scope(algorithm: Algorithm, groups: Sequence[SampleGroup]) -> None:
    """Credit follows the samples, whatever their order, and reaches as far as the traits say."""
    traits, credit = algorithm.traits, algorithm.assign_credit(groups)
    backwards = [
        make_group(group.rewards[::-1].tolist(), group.group_id, lengths=group.lengths[::-1].tolist())
        for group in reversed(groups)
    ]
    turned = [values[::-1] for values in reversed(algorithm.assign_credit(backwards))]
    follows = all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(credit, turned, strict=True))
    expect(follows, "assign_credit() must not depend on the order of groups or of their samples")
    if traits.credit_scope == "group":
        alone = [algorithm.assign_credit([group])[0] for group in groups]
        same = all(np.array_equal(a, b) for a, b in zip(credit, alone, strict=True))
        expect(same, 'assign_credit() looks beyond a group, but traits.credit_scope is "group"')
    if traits.min_group_size > 1:
        (lonely,) = algorithm.assign_credit([make_group([0.7] * (traits.min_group_size - 1))])
        expect(not lonely.any(), "a group smaller than traits.min_group_size must get credit 0")


def _check_token_advantages(algorithm: Algorithm, micro_batch: MicroBatch) -> None:
    before = micro_batch.advantages.copy()
    values = algorithm.token_advantages(micro_batch)
    expect(values.dtype == np.float32, "token_advantages() must be float32")
    expect(values.shape == micro_batch.token_ids.shape, "token_advantages() must have one value a token: [N]")
    expect(bool(np.isfinite(values).all()), "token_advantages() must be finite")
    masked = values[micro_batch.loss_mask == 0]
    expect(not masked.any(), "token_advantages() must be 0 where the loss mask is 0")
    expect(np.array_equal(before, micro_batch.advantages), "token_advantages() must not write into the micro-batch")
    again = algorithm.token_advantages(micro_batch)
    expect(np.array_equal(values, again), "token_advantages() must be pure: equal inputs give equal values")
    for name in algorithm.traits.columns:
        lacking = msgspec.structs.replace(micro_batch, **{name: None})
        sentence = f"token_advantages() of a micro-batch without {name} must raise InputError"
        expect_error(InputError, partial(algorithm.token_advantages, lacking), sentence)


def _check_loss(algorithm: Algorithm, make_loss_inputs: Callable[[], LossInputs]) -> None:
    output = algorithm.loss(make_loss_inputs())
    loss: Any = output.loss
    expect(loss.ndim == 0, "the loss must be a scalar")
    expect(bool(loss.requires_grad), "the loss must be connected to the graph, even when no token takes part")
    value = float(loss.detach())
    expect(bool(np.isfinite(value)), "the loss of finite inputs must be finite")
    for kind, figures in (("sum", output.sums), ("maximum", output.maxima)):
        for name, figure in figures.items():
            _check_figure(f"the {kind} {name!r}", figure)
    _check_counts(output)
    again: Any = algorithm.loss(make_loss_inputs()).loss
    expect(float(again.detach()) == value, "loss() must be pure: equal inputs give an equal loss")
    loss.backward()


def _check_figure(what: str, figure: Any) -> float:
    expect(figure.ndim == 0, f"{what} must be a scalar")
    expect(not figure.requires_grad, f"{what} must be detached")
    expect(bool(np.isfinite(float(figure))), f"{what} must be finite")
    return float(figure)


def _check_counts(output: LossOutput) -> None:
    expect(output.denominator > 0, "the denominator must be above 0: it is the step's planned units")
    rejected = _check_figure("the count of rejected units", output.rejected)
    expect(0 <= rejected <= output.denominator, "rejected units must be between 0 and the denominator")
