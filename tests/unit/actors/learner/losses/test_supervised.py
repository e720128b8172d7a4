"""Likelihood of demonstrations."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.losses.normalization import Normalization
from headrace.actors.learner.losses.supervised import supervised_loss


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_the_token_mean_is_the_mean_negative_log_likelihood(kit: Any, seed: int) -> None:
    samples = kit.draw(seed)
    found = kit.run(supervised_loss, samples)
    scores = [s.current[t] for s in samples for t in s.tokens()]
    assert found.loss == pytest.approx(-float(np.mean(scores)) if scores else 0.0)
    assert found.sums["nll"] == pytest.approx(-sum(scores))
    for s, gradient in zip(samples, found.gradients, strict=True):
        np.testing.assert_allclose(gradient, np.where(s.mask, -1.0 / max(1, len(scores)), 0.0))


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_the_sequence_mean_weighs_each_demonstration_alike(kit: Any, seed: int) -> None:
    samples = kit.draw(seed)
    found = kit.run(lambda i: supervised_loss(i, Normalization(unit="sequence")), samples)
    means = [-np.mean([s.current[t] for t in s.tokens()]) for s in samples if s.tokens()]
    assert found.loss == pytest.approx(float(np.mean(means)) if means else 0.0)


def test_it_is_torchs_cross_entropy(kit: Any) -> None:
    samples = kit.draw(5)
    inputs = kit.pack(samples)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(inputs.loss_mask), 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 7, (len(inputs.loss_mask),), generator=generator)
    logprobs = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    found = supervised_loss(kit.pack(samples, logprobs=logprobs)).loss
    expected = torch.nn.functional.cross_entropy(logits[inputs.loss_mask], targets[inputs.loss_mask])
    torch.testing.assert_close(found, expected)
