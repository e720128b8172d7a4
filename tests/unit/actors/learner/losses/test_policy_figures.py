"""Figures of the policy loss where a correction rejects tokens that keep a weight of their own."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.actors.learner.losses.policy import PolicyLossOptions, policy_loss
from headrace.engine.config.algorithm import ImportanceConfig


def test_figures_of_the_loss_leave_out_a_rejected_sequence_and_those_of_the_mismatch_do_not(kit: Any) -> None:
    """The second sequence is 1.5 nats a token from its sampler; all its tokens would be clipped."""
    template = kit.draw(0)[0]
    steady, far = (
        replace(
            template,
            mask=np.array([False, True, True]),
            proximal=np.array([np.nan, -1.0, -1.0]),
            current=np.array([np.nan, -1.0 + math.log(1.5), -1.0]),
            behaviour=np.array([np.nan, -1.0 - gap, -1.0 - gap]),
            reference=np.array([np.nan, -1.0, -1.0]),
            teacher=np.array([np.nan, -1.0, -1.0]),
            entropy=np.array([np.nan, 1.0, 1.0]),
            advantages=np.array([np.nan, 1.0, 1.0]),
        )
        for gap in (0.0, 1.5)
    )
    options = PolicyLossOptions(importance=ImportanceConfig(cap=2.0, reject_above=2.0))
    found = kit.run(lambda inputs: policy_loss(inputs, options), [steady, far])
    expected = {
        "pg_loss": -1.28 - 1.0,
        "clipfrac": 1.0,
        "rejected": 2.0,
        "importance_weight": 2.0,
        "importance_weight_sq": 2.0,
        "importance_raw": 2.0 + 2 * math.exp(1.5),
        "mismatch_kl": -3.0,
        "mismatch_abs": 3.0,
        "ppo_kl": -2 * math.log(1.5),
    }
    assert {name: found.sums[name] for name in expected} == pytest.approx(expected)
    assert (found.rejected, found.denominator) == (2.0, 4.0)
    assert not found.gradients[1].any()
