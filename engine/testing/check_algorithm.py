"""Conformance of an `Algorithm`. No tensor library is imported: the caller hands in the loss's inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine.errors import InputError
from headrace.engine.interfaces import Algorithm, LossInputs
from headrace.engine.testing.check_trainer import make_micro_batch
from headrace.engine.testing.expect import expect, expect_error
from headrace.engine.types import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """A `GroupRewards` for tests: rewards float64 [G], lengths int64 [G]."""

    group_id: str
    rewards: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]


def make_group(rewards: Sequence[float], group_id: str = "g") -> SampleGroup:
    """A group with read-only rewards and lengths 3, 4, 5, ..."""
    values = np.array(rewards, np.float64)
    lengths = np.arange(3, 3 + values.size, dtype=np.int64)
    values.flags.writeable = False
    lengths.flags.writeable = False
    return SampleGroup(group_id=group_id, rewards=values, lengths=lengths)


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
        micro_batch: For `token_advantages`; the default has two sequences.

    Raises:
        AssertionError: With one sentence on the first rule that is broken.
    """
    algorithm = factory()
    generator_before = _global_generator()
    _check_credit(algorithm, factory())
    _check_token_advantages(algorithm, micro_batch or make_micro_batch())
    if make_loss_inputs is not None:
        _check_loss(algorithm, make_loss_inputs)
    expect(_global_generator() == generator_before, "an algorithm must not use numpy's global generator")


def _global_generator() -> tuple[bytes, int]:
    state: Any = np.random.get_state(legacy=False)
    return state["state"]["key"].tobytes(), state["state"]["pos"]


def _check_credit(algorithm: Algorithm, other: Algorithm) -> None:
    groups = [make_group([1.0, 0.0, 0.0, 0.5], "a"), make_group([0.25, 0.75], "b"), make_group([1.0, 1.0, 1.0], "c")]
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
    for name, rewards in (
        ("a NaN", [1.0, float("nan")]),
        ("an infinite reward", [float("inf"), 0.0]),
        ("no reward", []),
    ):
        bad = make_group(rewards)
        sentence = f"assign_credit() of a group with {name} must raise InputError"
        expect_error(InputError, partial(algorithm.assign_credit, [bad]), sentence)


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


def _check_loss(algorithm: Algorithm, make_loss_inputs: Callable[[], LossInputs]) -> None:
    output = algorithm.loss(make_loss_inputs())
    loss: Any = output.loss
    expect(loss.ndim == 0, "the loss must be a scalar")
    expect(bool(loss.requires_grad), "the loss must be connected to the graph, even when no token takes part")
    value = float(loss.detach())
    expect(bool(np.isfinite(value)), "the loss of finite inputs must be finite")
    for name, total in output.sums.items():
        tensor: Any = total
        expect(tensor.ndim == 0, f"the sum {name!r} must be a scalar")
        expect(not tensor.requires_grad, f"the sum {name!r} must be detached")
        expect(bool(np.isfinite(float(tensor))), f"the sum {name!r} must be finite")
    again: Any = algorithm.loss(make_loss_inputs()).loss
    expect(float(again.detach()) == value, "loss() must be pure: equal inputs give an equal loss")
    loss.backward()
