"""Importance weights between sampler and learner."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.losses.ratios import (
    Level,
    collapsed_weight_warning,
    effective_sample_size,
    importance_ratio,
    importance_weights,
    truncate_weight,
)
from headrace.engine.config.algorithm import ImportanceConfig
from headrace.engine.errors import ConfigError


def weights(gaps: list[list[float]], **options: Any) -> Any:
    """Weights of sequences whose tokens have these gaps."""
    gap = torch.tensor([g for row in gaps for g in row])
    ids = torch.tensor([i for i, row in enumerate(gaps) for _ in row], dtype=torch.int64)
    mask = torch.ones(len(gap), dtype=torch.bool)
    return importance_weights(gap, torch.zeros_like(gap), mask, ids, ImportanceConfig(**options))


def test_sequence_weight_length_keeps_a_harmless_gap_harmless() -> None:
    """K-036: geometric mean 0.999; the product is the textbook weight, and is 0.135."""
    gap = [[-0.001] * 2000]
    assert weights(gap, level="sequence").weight.tolist() == pytest.approx([0.999] * 2000, abs=1e-6)
    assert weights(gap, level="product").weight.tolist() == pytest.approx([0.135335] * 2000, abs=1e-5)
    assert weights(gap).weight.mean().item() == pytest.approx(0.999, abs=1e-6)  # the default stays near 1


def test_sequence_weight_length_warns_when_weights_collapse_over_a_tiny_gap() -> None:
    """K-036: a mean weight below about a half with a tiny gap a token."""
    warning = collapsed_weight_warning(0.135, 0.001)
    assert warning is not None and "importance.level" in warning and "0.135" in warning
    assert collapsed_weight_warning(0.999, 0.001) is None
    assert collapsed_weight_warning(0.135, 2.0) is None  # policies that do differ


def test_ratio_exponent_bound_is_on_the_mean_of_a_sequence() -> None:
    """K-066, for the correction: 90 and -90 cancel exactly; 400 and 400 stay finite."""
    for level in ("sequence", "product"):
        found = weights([[90.0, -90.0], [400.0, 400.0], [-400.0, -400.0]], level=level, cap=1e30)
        assert found.raw[:2].tolist() == [1.0, 1.0]
        assert found.raw.isfinite().all() and found.weight.isfinite().all()
        assert found.raw[2].item() > 1e8 and found.raw[4].item() < 1e-8
        # A token beyond the bound counts in full where the others bring the whole back.
        uneven = {"sequence": 1.0, "product": 2.0}[level]
        assert weights([[32.0, -30.0]], level=level, cap=1e30).raw[0].item() == pytest.approx(math.exp(uneven))


def test_filter_then_truncate_does_both() -> None:
    """K-067: a kept sequence is truncated token by token; a dropped one has finite weights that nobody takes."""
    found = weights([[math.log(8.0), math.log(0.125)], [200.0, 200.0]], cap=2.0, reject_below=0.5, reject_above=2.0)
    assert found.kept.tolist() == [True, True, False, False]
    assert found.weight[:2].tolist() == pytest.approx([2.0, 0.125])
    assert found.weight.isfinite().all()


def test_bounds_of_rejection_include_their_ends_and_can_be_off() -> None:
    rows = [[math.log(0.5)], [0.0], [math.log(2.0)], [math.log(2.1)], [math.log(0.4)]]
    in_float64 = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    ids, mask = torch.arange(5), torch.ones(5, dtype=torch.bool)

    def kept(**bounds: float) -> list[bool]:
        options = ImportanceConfig(kind="none", **bounds)
        return importance_weights(in_float64, torch.zeros(5), mask, ids, options).kept.tolist()

    exact = torch.exp(in_float64)
    low, high = exact[0].item(), exact[2].item()
    assert kept() == [True] * 5
    assert kept(reject_below=low) == [True, True, True, True, False]
    assert kept(reject_above=high) == [True, True, True, False, True]
    assert kept(reject_below=low, reject_above=high) == [True, True, True, False, False]


def test_importance_kinds_differ_only_above_the_cap() -> None:
    raw = torch.tensor([0.5, 2.0, 8.0])
    assert truncate_weight(raw, kind="tis", cap=2.0).tolist() == [0.5, 2.0, 2.0]
    assert truncate_weight(raw, kind="mask", cap=2.0).tolist() == [0.5, 2.0, 0.0]
    assert truncate_weight(raw, kind="none", cap=2.0).tolist() == [1.0, 1.0, 1.0]


def test_a_masked_kind_rejects_above_the_cap_and_no_other_does() -> None:
    gaps = [[0.0, math.log(8.0)]]
    assert weights(gaps, kind="mask").kept.tolist() == [True, False]
    assert weights(gaps, kind="tis").kept.tolist() == [True, True]
    assert weights(gaps, kind="none").kept.tolist() == [True, True]
    assert weights([[0.0, math.log(64.0)]], kind="mask", level="sequence").kept.tolist() == [False, False]


def test_weights_carry_no_gradient_and_ignore_masked_tokens() -> None:
    proximal = torch.tensor([0.1, float("nan"), 0.3], requires_grad=True)
    behaviour = torch.tensor([0.0, float("-inf"), 0.0])
    mask, ids = torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.int64)
    for level in ("token", "sequence", "product"):
        found = importance_weights(
            proximal,
            behaviour,
            mask,
            ids,
            ImportanceConfig(level=level, reject_above=3.0),  # type: ignore[arg-type]
        )
        assert not any(values.requires_grad for values in (found.weight, found.raw, found.gap))
        assert found.gap.tolist() == pytest.approx([0.1, 0.0, 0.3])
        assert found.raw.isfinite().all() and found.kept.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cap": 0.0}, "above 0"),
        ({"cap": float("nan")}, "above 0"),
        ({"reject_below": 2.0, "reject_above": 0.5}, "no sequence lies between"),
    ],
)
def test_constants_that_leave_nothing_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        weights([[0.0]], **options)


def test_the_effective_sample_size_is_the_share_that_counts() -> None:
    assert effective_sample_size(4.0, 4.0, 4) == 1.0
    assert effective_sample_size(2 * 3.0, 2 * 9.0, 4) == 0.5  # two equal weights of four tokens
    assert effective_sample_size(1.0, 1.0, 8) == 0.125  # all weight on one of eight
    assert effective_sample_size(0.0, 0.0, 4) == 0.0
    assert effective_sample_size(0.0, 0.0, 0) == 0.0


def raw_by_loops(sample: Any, t: int, level: Level) -> float:
    gaps = [sample.proximal[u] - sample.behaviour[u] for u in sample.tokens()]
    if level == "token":
        return math.exp(sample.proximal[t] - sample.behaviour[t])
    return math.exp(sum(gaps) / len(gaps)) if level == "sequence" else math.prod(math.exp(g) for g in gaps)


@pytest.mark.parametrize("kind", ["tis", "mask", "none"])
@pytest.mark.parametrize("level", ["token", "sequence", "product"])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_weights_and_rejections_agree_with_their_definition(kit: Any, level: Level, kind: Any, seed: int) -> None:
    samples = kit.draw(seed)
    inputs = kit.pack(samples)
    options = ImportanceConfig(level=level, kind=kind, cap=1.3, reject_below=0.8, reject_above=1.25)
    found = importance_weights(
        inputs.proximal_logprobs, inputs.behaviour_logprobs, inputs.loss_mask, inputs.sequence_ids, options
    )
    start = 0
    for sample in samples:
        for t in sample.tokens():
            raw = raw_by_loops(sample, t, level)
            geometric = raw_by_loops(sample, t, "sequence")
            kept = 0.8 <= geometric <= 1.25 and not (kind == "mask" and raw > 1.3)
            assert found.raw[start + t].item() == pytest.approx(raw)
            assert found.kept[start + t].item() == kept
            if kept:
                expected = {"tis": min(raw, 1.3), "mask": raw, "none": 1.0}[kind]
                assert found.weight[start + t].item() == pytest.approx(expected)
        start += len(sample.mask)
    assert not (found.kept & ~inputs.loss_mask).any()


def test_importance_corrects_an_expectation_exactly_when_nothing_is_truncated() -> None:
    """Sampling from one categorical and weighing gives the mean under the other, summed over all outcomes."""
    rng = np.random.default_rng(0)
    sampler, learner, value = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6)), rng.normal(size=6)
    mask, ids = torch.ones(6, dtype=torch.bool), torch.arange(6)
    gap = torch.tensor(np.log(learner) - np.log(sampler))
    weight = importance_ratio(gap, mask, ids, level="token").numpy()
    assert float((sampler * weight * value).sum()) == pytest.approx(float((learner * value).sum()))
