"""DPO over packed pairs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.loss_inputs import TensorLossInputs
from headrace.actors.learner.losses.preference import preference_loss
from headrace.engine.errors import ConfigError, InputError


def dpo_case(*, prompt: float = -3.0, pad: float = -50.0) -> TensorLossInputs:
    """The pair of K-068: two prompt tokens, then the answer, padded to six tokens; chosen first."""
    policy = [prompt, prompt, -1.0, -1.0, -1.0, pad, prompt, prompt, -2.0, pad, pad, pad]
    reference = [prompt - 1, prompt - 1, -1.5, -1.5, -1.5, pad, prompt - 1, prompt - 1, -1.0, pad, pad, pad]
    mask = [0, 0, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0]
    zeros = torch.zeros(12)
    return TensorLossInputs(
        logprobs=torch.tensor(policy, requires_grad=True),
        reference_logprobs=torch.tensor(reference),
        advantages=torch.tensor([1.0] * 6 + [-1.0] * 6),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        sequence_ids=torch.tensor([0] * 6 + [1] * 6),
        group_ids=torch.tensor([0, 0]),
        entropy=None,
        proximal_logprobs=zeros,
        behaviour_logprobs=zeros,
        teacher_logprobs=None,
        kl_coef=0.0,
        num_loss_tokens=4,
        num_sequences=2,
        num_groups=1,
    )


def test_dpo_sum_is_of_log_probabilities_with_both_halves_masked() -> None:
    """K-068: margin 2.5, loss 0.575939, implicit rewards 0.15 and -0.1; never 0.620957."""
    for inputs in (dpo_case(), dpo_case(prompt=-9.0), dpo_case(pad=float("-inf")), dpo_case(pad=float("nan"))):
        output = preference_loss(inputs, beta=0.1)
        output.loss.backward()
        assert output.loss.item() == pytest.approx(0.575939, abs=1e-6)
        assert output.sums["chosen_reward"].item() == pytest.approx(0.15)
        assert output.sums["rejected_reward"].item() == pytest.approx(-0.1)
        assert output.sums["preference_margin"].item() == pytest.approx(0.25)
        assert output.sums["preference_accuracy"].item() == output.sums["pairs"].item() == 1
        slope = 0.1 / (1 + math.exp(0.25))
        expected = [0, 0, -slope, -slope, -slope, 0, 0, 0, slope, 0, 0, 0]
        assert inputs.logprobs.grad.tolist() == pytest.approx(expected, abs=1e-6)


def by_loops(samples: Sequence[Any], beta: float) -> float:
    losses = []
    for group in {s.group for s in samples}:
        rewards = {}
        for s in samples:
            if s.group == group:
                gaps = [s.current[t] - s.reference[t] for t in s.tokens()]
                rewards[s.advantages[s.tokens()[0]]] = beta * sum(gaps)
        losses.append(-math.log(1 / (1 + math.exp(-(rewards[1.0] - rewards[-1.0])))))
    return float(np.mean(losses))


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_value_and_gradient_agree_with_the_equation_in_any_order(kit: Any, seed: int) -> None:
    samples = kit.draw(seed, pairs=True)
    order = np.random.default_rng(seed).permutation(len(samples))
    samples = [samples[i] for i in order]
    found = kit.run(lambda i: preference_loss(i, beta=0.4), samples)
    assert found.loss == pytest.approx(by_loops(samples, 0.4))
    kit.assert_same(found.gradients, kit.slopes(lambda moved: by_loops(moved, 0.4), samples))
    assert found.denominator == len(samples) / 2 == found.sums["pairs"]


def test_a_pair_far_apart_stays_finite() -> None:
    inputs = dpo_case()
    far = replace(inputs, reference_logprobs=torch.where(inputs.advantages > 0, 1e4, -1e4).float())
    output = preference_loss(far, beta=1.0)
    output.loss.backward()
    assert output.loss.isfinite() and far.logprobs.grad.isfinite().all()
    assert far.logprobs.grad[2].item() == -1.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"advantages": torch.ones(12)}, "exactly one of each"),
        ({"advantages": torch.zeros(12)}, "exactly one of each"),
        ({"group_ids": torch.tensor([0, 1])}, "exactly one of each"),
        ({"group_ids": torch.tensor([0])}, "give one a sequence"),
        ({"group_ids": None}, "no group_ids"),
        ({"reference_logprobs": None}, "no reference_logprobs"),
        ({"loss_mask": torch.tensor([True] * 6 + [False] * 6)}, "exactly one of each"),
        ({"advantages": torch.ones(5)}, "advantages has the shape"),
    ],
)
def test_what_is_not_a_pair_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        preference_loss(replace(dpo_case(), **changed), beta=0.1)


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan")])
def test_a_beta_that_is_not_above_zero_is_refused(beta: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        preference_loss(dpo_case(), beta=beta)


def test_padding_sequences_belong_to_no_pair() -> None:
    pair = dpo_case()
    padded = {
        name: torch.cat([getattr(pair, name).detach(), torch.zeros(3)])
        for name in ("logprobs", "reference_logprobs", "advantages", "proximal_logprobs", "behaviour_logprobs")
    }
    inputs = replace(
        pair,
        **padded,
        loss_mask=torch.cat([pair.loss_mask, torch.zeros(3, dtype=torch.bool)]),
        sequence_ids=torch.cat([pair.sequence_ids, torch.full((3,), 2)]),
        group_ids=torch.tensor([0, 0, 1]),
    )
    assert preference_loss(inputs, beta=0.1).loss.item() == pytest.approx(0.575939, abs=1e-6)


def test_all_masked_needs_no_column_and_gives_a_connected_zero() -> None:
    """K-011."""
    inputs = replace(dpo_case(), loss_mask=torch.zeros(12, dtype=torch.bool), group_ids=None, reference_logprobs=None)
    output = preference_loss(inputs, beta=0.1)
    output.loss.backward()
    assert output.loss.item() == 0.0 and inputs.logprobs.grad.tolist() == [0.0] * 12
    assert set(output.sums) == set(preference_loss(dpo_case(), beta=0.1).sums)
