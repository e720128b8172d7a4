"""Token mean, sequence mean and constant length, by counts of the whole step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.losses.normalization import Normalization, Unit, normalize_tokens
from headrace.engine.errors import ConfigError

UNITS: list[Unit] = ["token", "sequence", "constant"]


def reduce(costs: Sequence[Sequence[float]], unit: Unit = "token", **given_: Any) -> Any:
    """Reduce ragged per-token losses; counts default to those of what is given."""
    values = given_.pop("values", torch.tensor([c for row in costs for c in row], dtype=torch.float64))
    mask = torch.ones(len(values), dtype=torch.bool)
    ids = torch.tensor([i for i, row in enumerate(costs) for _ in row], dtype=torch.int64)
    settings_ = {"num_loss_tokens": len(values), "num_sequences": len(costs), "mask": mask, **given_}
    fixed, length = settings_.pop("fixed", False), settings_.pop("length", 10 if unit == "constant" else 0)
    normalization = Normalization(unit=unit, length=length, fixed=fixed)
    return normalize_tokens(values, settings_.pop("mask"), ids, normalization=normalization, **settings_)


def test_token_mean_microbatch_loss_and_gradient_do_not_depend_on_the_cut() -> None:
    """K-001: 24 / 12 under every split, never a mean of means."""
    costs = [[1.0] * 8, [5.0] * 2, [3.0] * 2]
    for split in ([[0, 1, 2]], [[0], [1, 2]], [[0], [1], [2]], [[0, 1], [2]]):
        w = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
        total = 0.0
        for part in split:
            rows = [costs[index] for index in part]
            values = w * torch.tensor([c for row in rows for c in row])
            loss = reduce(rows, values=values, num_loss_tokens=12).loss
            loss.backward()
            total += loss.item()
        assert total == pytest.approx(2.0)
        assert w.grad is not None and w.grad.item() == pytest.approx(2.0)


def test_token_mean_ranks_divide_by_the_tokens_of_all() -> None:
    """K-002: rank parts 0.9 and 1.1 add up to 2; each of them alone would have averaged to 6."""
    parts = [reduce([[1.0] * 9], num_loss_tokens=10), reduce([[11.0]], num_loss_tokens=10)]
    assert [part.loss.item() for part in parts] == pytest.approx([0.9, 1.1])
    assert [part.loss.item() * 2 for part in parts] == pytest.approx([1.8, 2.2])  # what an averaging layer gets


@pytest.mark.parametrize("micro_batches", [[[0, 1]], [[0], [1]]])
@pytest.mark.parametrize("width", [6, 8, 10])
def test_drgrpo_constant_does_not_depend_on_padded_width_or_cut(micro_batches: list[list[int]], width: int) -> None:
    """K-031: (2 + 6) / (2 x 10) in every variant."""
    total = 0.0
    for part in micro_batches:
        rows = [[1.0] * width for _ in part]
        real = [t < (2, 6)[index] for index in part for t in range(width)]
        total += reduce(rows, "constant", mask=torch.tensor(real), num_sequences=2, num_loss_tokens=8).loss.item()
    assert total == pytest.approx(0.4)


@pytest.mark.parametrize("length", [0, -1])
def test_drgrpo_constant_needs_a_known_constant(length: int) -> None:
    """K-031: asking for this mode without a constant is an error in the configuration."""
    with pytest.raises(ConfigError, match="length_constant"):
        Normalization(unit="constant", length=length)


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="token, sequence or constant"):
        Normalization(unit="batch")  # type: ignore[arg-type]


def whole(part: Any) -> float:
    """The step's loss, as a trainer rescales it."""
    left = part.denominator - part.rejected.item()
    return part.loss.item() * part.denominator / left if left else 0.0


def test_reject_denominator_leaves_out_rejected_tokens_and_sequences() -> None:
    """K-035: token mean 3.0 and not 1.2; sequence mean 3.0 and not 1.5."""
    rows = [[1.0, 2.0, 3.0, 4.0, 5.0], [7.0, 9.0]]
    kept = torch.tensor([True, False, False, False, True, False, False])
    assert whole(reduce(rows[:1], kept=kept[:5])) == pytest.approx(3.0)
    assert whole(reduce(rows, kept=kept)) == pytest.approx(3.0)
    by_sequence = reduce(rows, "sequence", kept=kept)
    assert whole(by_sequence) == pytest.approx(3.0)
    assert (by_sequence.denominator, by_sequence.rejected.item()) == (2.0, 1.0)
    by_constant = reduce(rows, "constant", kept=kept)
    assert whole(by_constant) == pytest.approx(6.0 / 10.0)
    assert (by_constant.denominator, by_constant.rejected.item()) == (20.0, 10.0)


def test_reject_denominator_stays_when_it_is_fixed_on_purpose() -> None:
    """K-035: the named option."""
    rows = [[1.0, 2.0, 3.0, 4.0, 5.0], [7.0, 9.0]]
    kept = torch.tensor([True, False, False, False, True, False, False])
    expected = {"token": 6.0 / 7.0, "sequence": 6.0 / 5.0 / 2.0, "constant": 6.0 / 20.0}
    for unit in UNITS:
        part = reduce(rows, unit, kept=kept, fixed=True)
        assert part.rejected.item() == 0.0
        assert whole(part) == pytest.approx(expected[unit]), unit


@pytest.mark.parametrize("unit", UNITS)
def test_reject_denominator_of_a_step_with_nothing_left_is_all_of_it(unit: Unit) -> None:
    """K-035: loss 0, and every planned unit is reported as rejected, so that the step can be skipped."""
    part = reduce([[1.0, 2.0], [3.0]], unit, kept=torch.zeros(3, dtype=torch.bool))
    assert part.loss.item() == 0.0
    assert part.rejected.item() == part.denominator
    assert part.rejected.dtype == torch.float32


@pytest.mark.parametrize("unit", UNITS)
def test_all_masked_gives_a_connected_zero_and_rejects_nothing(unit: Unit) -> None:
    """K-011, also in a step without a token."""
    for planned in (0, 5):
        leaf = torch.full((3,), float("nan"), requires_grad=True)
        mask = torch.zeros(3, dtype=torch.bool)
        part = reduce([[0.0] * 3], unit, values=leaf, mask=mask, num_loss_tokens=planned, num_sequences=planned)
        part.loss.backward()
        assert (part.loss.item(), part.rejected.item()) == (0.0, 0.0)
        assert part.denominator >= 1
        assert leaf.grad is not None and leaf.grad.tolist() == [0.0, 0.0, 0.0]


def by_loops(samples: list[Any], keeps: list[np.ndarray], unit: Unit, *, fixed: bool) -> float:
    """The step's loss from the definitions; the entropy column stands for the loss of a token."""
    total = units = 0.0
    for sample, keep in zip(samples, keeps, strict=True):
        kept = [sample.entropy[t] for t in sample.tokens() if keep[t]]
        planned = len(sample.tokens())
        counts = planned if fixed else len(kept)
        if unit == "token":
            total, units = total + sum(kept), units + counts
        elif counts and unit == "sequence":
            total, units = total + sum(kept) / counts, units + 1
        elif counts:
            total, units = total + sum(kept), units + 10
    return total / units if units else 0.0


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("unit", UNITS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_every_normalisation_agrees_with_its_definition_whatever_the_cut(
    kit: Any, unit: Unit, fixed: bool, seed: int
) -> None:
    samples = kit.draw(seed)
    rng = np.random.default_rng(seed + 1)
    keeps = [rng.random(len(s.mask)) < 0.6 for s in samples]
    counts = {k: v for k, v in kit.counts(samples).items() if k != "num_groups"}
    normalization = Normalization(unit=unit, length=10, fixed=fixed)
    expected = by_loops(samples, keeps, unit, fixed=fixed)
    cut = int(rng.integers(0, len(samples) + 1))
    for order in (list(range(len(samples))), rng.permutation(len(samples)).tolist()):
        loss = rejected = 0.0
        for part in (order[:cut], order[cut:]):
            inputs = kit.pack([samples[i] for i in part])
            kept = torch.tensor(np.concatenate([np.zeros(0, bool), *(keeps[i] for i in part)]))
            reduced = normalize_tokens(
                inputs.entropy, inputs.loss_mask, inputs.sequence_ids, normalization=normalization, kept=kept, **counts
            )
            loss, rejected = loss + reduced.loss.item(), rejected + reduced.rejected.item()
        left = reduced.denominator - rejected
        assert (loss * reduced.denominator / left if left else 0.0) == pytest.approx(expected, abs=1e-12)
