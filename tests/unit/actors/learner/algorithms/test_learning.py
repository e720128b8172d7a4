"""Every method learns: the bandit of token_bandit.py is run from stale samples to a documented return."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.engine.config import AlgorithmConfig
from headrace.engine.config.algorithm import ImportanceConfig
from headrace.engine.interfaces import Algorithm
from headrace.engine.plugins import load_entry_point

GROUP_RELATIVE = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")
ON_POLICY_LOSS = (*GROUP_RELATIVE, "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", "distillation")
EVERY_METHOD = (*ON_POLICY_LOSS, "dpo", "sft")

# After 30 updates from samples two updates old: the exact mean score, which begins at 0.11 and cannot pass 1.
RETURNS = {**dict.fromkeys(ON_POLICY_LOSS, 0.95), "dpo": 0.6, "sft": 0.7}


def make(name: str, **settings: Any) -> Algorithm:
    method: Any = load_entry_point("headrace.algorithms", name)
    return method(AlgorithmConfig(name=name, length_constant=3, **settings))


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_a_method_learns_the_bandit(name: str, bandit: Callable[..., Any]) -> None:
    run = bandit(make(name)).run(30)
    assert run.history[0] < 0.12
    assert run.history[-1] > RETURNS[name]
    assert run.junk.grad is not None
    assert run.junk.grad.item() == 0.0  # scores of prompt tokens never get a gradient
    if name == "dapo":
        assert (run.num_replaced > 0, run.num_flat) == (True, 0)
    else:
        assert run.num_replaced == 0


@pytest.mark.parametrize("name", [name for name in ON_POLICY_LOSS if name not in ("ppo", "distillation")])
def test_the_importance_weight_makes_a_stale_batch_point_where_the_current_policy_improves(
    name: str, bandit: Callable[..., Any]
) -> None:
    """Over all responses of an old policy the expected gradient is that of the current policy's return, exactly."""
    prompt, gradients, expected = 1, {}, torch.zeros(())
    for kind in ("tis", "none"):
        run = bandit(
            make(name, normalization="constant", importance=ImportanceConfig(kind=kind, level="product", cap=1e6))
        )
        generator = torch.Generator().manual_seed(5)
        noise = torch.randn(run.policy.logits.shape, dtype=torch.float64, generator=generator)
        run.policy.logits.data += noise  # the served policy is still the first one
        rows = run.every_response(prompt, baseline=0.3)
        run.algorithm.loss(run.loss_inputs(run.pack(rows), rows)).loss.backward()
        gradients[kind] = run.policy.logits.grad[prompt] * 3  # the constant length
        expected = run.gradient_of_return(prompt)
    assert torch.allclose(gradients["tis"], -expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(gradients["none"], -expected, rtol=0.1, atol=1e-3)
