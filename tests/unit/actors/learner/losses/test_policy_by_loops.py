"""The clipped policy loss against loops written from its formulas, and its gradient against finite differences."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.losses.normalization import Normalization, Unit
from headrace.actors.learner.losses.policy import PolicyLossOptions, policy_loss
from headrace.engine.config.algorithm import ImportanceConfig


def by_loops(samples: Sequence[Any], options: PolicyLossOptions, kl_coef: float) -> float:
    """The step's loss, token by token from the formulas."""
    rows, importance = [], options.importance
    for s in samples:
        gaps = [s.proximal[t] - s.behaviour[t] for t in s.tokens()]
        row = []
        for t in s.tokens():
            raw = math.exp(sum(gaps) / len(gaps) if importance.level == "sequence" else s.proximal[t] - s.behaviour[t])
            weight = {"tis": min(raw, importance.cap), "mask": raw, "none": 1.0}[importance.kind]
            r, a = math.exp(s.current[t] - s.proximal[t]), s.advantages[t]
            objective = min(r * a, min(max(r, 1 - options.clip_low), 1 + options.clip_high) * a)
            if a < 0 and options.dual_clip:
                objective = max(objective, options.dual_clip * a)
            d = s.reference[t] - s.current[t]
            kl = d * d / 2 if options.kl_estimator == "k2" else math.exp(d) - d - 1
            loss = -weight * objective + kl_coef * kl - options.entropy_coef * s.entropy[t]
            if not (importance.kind == "mask" and raw > importance.cap):
                row.append(loss)
        if row:
            rows.append(row)
    if not rows:
        return 0.0
    if options.normalization.unit == "sequence":
        return float(np.mean([np.mean(row) for row in rows]))
    if options.normalization.unit == "constant":
        return sum(map(sum, rows)) / (options.normalization.length * len(rows))
    return float(np.mean([loss for row in rows for loss in row]))


@pytest.mark.parametrize(
    ("level", "kind", "unit", "estimator"),
    [
        ("token", "tis", "token", "k3"),
        ("sequence", "tis", "sequence", "k2"),
        ("token", "mask", "constant", "k3"),
        ("sequence", "mask", "token", "k2"),
        ("token", "mask", "sequence", "k3"),
        ("token", "none", "token", "k2"),
    ],
)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=12, deadline=None, derandomize=True)  # a kink within a finite difference is not a finding
def test_value_and_gradient_agree_with_loops_and_finite_differences(
    kit: Any, level: Any, kind: Any, unit: Unit, estimator: Any, seed: int
) -> None:
    options = PolicyLossOptions(
        dual_clip=1.6,
        importance=ImportanceConfig(level=level, kind=kind, cap=1.2),
        normalization=Normalization(unit=unit, length=9),
        kl_estimator=estimator,
        entropy_coef=0.3,
    )
    samples = kit.draw(seed)
    found = kit.run(lambda i: policy_loss(i, options), samples, kl_coef=0.7)
    assert found.loss * found.factor == pytest.approx(by_loops(samples, options, 0.7), abs=1e-12)
    slopes = kit.slopes(lambda moved: by_loops(moved, options, 0.7), samples)
    kit.assert_same([g * found.factor for g in found.gradients], slopes)
    entropy = kit.run(lambda i: policy_loss(i, options), samples, kl_coef=0.7, leaf="entropy")
    slopes = kit.slopes(lambda moved: by_loops(moved, options, 0.7), samples, name="entropy")
    kit.assert_same([g * found.factor for g in entropy.gradients], slopes)
