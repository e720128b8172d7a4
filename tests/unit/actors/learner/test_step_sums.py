"""Figures of a step, from micro-batches and ranks."""

import logging
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.actors.learner.forward import ForwardResult
from headrace.actors.learner.losses.contribution import LossContribution
from headrace.actors.learner.sharding import RankGroup
from headrace.actors.learner.step_sums import StepSums
from headrace.engine.types import MicroBatch


@pytest.fixture
def group(tmp_path: Path) -> Any:
    """A process group of this process alone."""
    made = RankGroup(rank=0, num_ranks=1, init_method=f"file://{tmp_path}/meet", device=torch.device("cpu"))
    yield made
    made.close()


def micro_batch(num_tokens: int) -> MicroBatch:
    """One sequence, all of it loss tokens."""
    zeros = np.zeros(num_tokens, np.float32)
    return MicroBatch(
        token_ids=np.zeros(num_tokens, np.int32),
        position_ids=np.arange(num_tokens, dtype=np.int32),
        sequence_ids=np.zeros(num_tokens, np.int32),
        loss_mask=np.ones(num_tokens, np.uint8),
        behaviour_logprobs=zeros,
        advantages=zeros,
        temperature=np.ones(1, np.float32),
        record_ids=("r",),
        lags=np.zeros(1, np.int32),
    )


def add(
    step: StepSums, num_tokens: int, *, loss: float, denominator: float, rejected: float = 0.0, **more: Any
) -> None:
    """One micro-batch whose loss gave these numbers."""
    scores = torch.zeros(num_tokens)
    step.add(
        micro_batch(num_tokens),
        ForwardResult(logprobs=scores, entropy=scores + 0.5, num_computed=num_tokens),
        LossContribution(
            loss=torch.tensor(loss),
            sums={name: torch.tensor(value) for name, value in more.get("sums", {}).items()},
            maxima={name: torch.tensor(value) for name, value in more.get("maxima", {}).items()},
            denominator=denominator,
            rejected=torch.tensor(rejected),
        ),
    )


def test_means_are_over_the_tokens_of_all_micro_batches(group: Any) -> None:
    sums = StepSums()
    add(sums, 3, loss=0.1, denominator=4.0, sums={"pg_loss": 1.0, "clipfrac": 1.0}, maxima={"importance_raw": 3.0})
    add(sums, 1, loss=0.2, denominator=4.0, sums={"pg_loss": 3.0, "clipfrac": 1.0}, maxima={"importance_raw": 2.0})
    norm, metrics = sums.reduce(group, 4.0, 4)
    assert norm == 4.0 and sums.factor == 1.0
    expected = {"actor/loss": 0.3, "actor/pg_loss": 1.0, "actor/pg_clipfrac": 0.5, "actor/entropy": 0.5}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["importance/weight_max"] == 3.0 and metrics["actor/grad_norm"] == 2.0


def test_reject_denominator_rescales_loss_norm_and_gradient_alike(group: Any) -> None:
    """K-035: costs 1 and 5 of five tokens, three of them rejected: 3.0, wherever the rejected ones stood."""
    sums = StepSums()
    add(sums, 4, loss=1.0 / 5, denominator=5.0, rejected=3.0, sums={"pg_loss": 1.0, "rejected": 3.0})
    add(sums, 1, loss=5.0 / 5, denominator=5.0, sums={"pg_loss": 5.0, "rejected": 0.0})
    norm, metrics = sums.reduce(group, 9.0, 5)
    assert norm == 9.0 and sums.factor == pytest.approx(2.5)
    assert metrics["actor/loss"] == pytest.approx(3.0) == metrics["actor/pg_loss"]
    assert metrics["actor/grad_norm"] == pytest.approx(7.5)
    assert metrics["importance/rejected_fraction"] == pytest.approx(0.6)


def test_reject_denominator_of_a_step_with_nothing_left_asks_for_no_update(group: Any) -> None:
    """K-035: the factor 0 says so."""
    sums = StepSums()
    add(sums, 2, loss=0.0, denominator=2.0, rejected=2.0, sums={"pg_loss": 0.0, "rejected": 2.0})
    _, metrics = sums.reduce(group, 0.0, 2)
    assert sums.factor == 0.0
    assert metrics["actor/loss"] == 0.0 and metrics["importance/rejected_fraction"] == 1.0


def test_the_effective_sample_size_is_of_the_whole_step(group: Any) -> None:
    sums = StepSums()
    add(sums, 2, loss=0.0, denominator=4.0, sums={"importance_weight": 6.0, "importance_weight_sq": 18.0})
    add(sums, 2, loss=0.0, denominator=4.0, sums={"importance_weight": 0.0, "importance_weight_sq": 0.0})
    _, metrics = sums.reduce(group, 0.0, 4)
    assert metrics["importance/ess"] == pytest.approx(0.5)
    assert metrics["importance/weight_mean"] == pytest.approx(1.5)
    assert not any(name.endswith("_sq") for name in metrics)


def test_sequence_weight_length_is_warned_of_once_a_step(group: Any, caplog: pytest.LogCaptureFixture) -> None:
    """K-036: 2000 tokens of weight 0.135 and a gap of 0.001 nat."""
    product = {"importance_raw": 2000 * math.exp(-2.0), "mismatch_abs": 2.0}
    with caplog.at_level(logging.WARNING):
        for raw, warnings in ((product, 1), ({"importance_raw": 1998.0, "mismatch_abs": 2.0}, 0)):
            caplog.clear()
            sums = StepSums()
            add(sums, 2000, loss=0.0, denominator=2000.0, sums=raw)
            _, metrics = sums.reduce(group, 0.0, 2000)
            assert len(caplog.records) == warnings
            assert metrics["importance/gap_abs_mean"] == pytest.approx(0.001)


def test_figures_of_pairs_are_means_over_pairs(group: Any) -> None:
    sums = StepSums()
    for accuracy in (1.0, 0.0):
        figures = {"pairs": 1.0, "preference_accuracy": accuracy, "preference_margin": 0.25}
        add(sums, 7, loss=0.5, denominator=2.0, sums=figures)
    _, metrics = sums.reduce(group, 0.0, 14)
    assert metrics["actor/preference_accuracy"] == 0.5 and metrics["actor/preference_margin"] == 0.25
    assert "actor/pairs" not in metrics


def test_records_of_a_loss_that_is_not_finite_are_remembered(group: Any) -> None:
    sums = StepSums()
    add(sums, 1, loss=float("nan"), denominator=2.0)
    add(sums, 1, loss=0.5, denominator=2.0)
    _, metrics = sums.reduce(group, float("nan"), 2)
    assert sums.suspects == ["r"] and "actor/loss" not in metrics


def test_a_step_without_a_computed_token_has_no_means(group: Any) -> None:
    """All samples were without advantage: what was not measured is not 0, and nothing may be steered by it."""
    sums = StepSums()
    scores = torch.zeros(1)
    sums.add(
        msgspec.structs.replace(micro_batch(1), loss_mask=np.zeros(1, np.uint8)),
        ForwardResult(logprobs=scores, entropy=scores, num_computed=1),
        LossContribution(
            loss=torch.tensor(0.0),
            sums={name: torch.tensor(0.0) for name in ("pg_loss", "mismatch_kl", "importance_weight_sq", "kl")},
            maxima={"importance_raw": torch.tensor(0.0)},
            denominator=12.0,
            rejected=torch.tensor(0.0),
        ),
    )
    _, metrics = sums.reduce(group, 0.0, 12)
    assert metrics == {
        "actor/loss": 0.0,
        "actor/pg_loss": 0.0,
        "actor/grad_norm": 0.0,
        "perf/tokens": 0.0,
        "perf/tokens_computed": 1.0,
    }
