from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from headrace.actors.learner.losses.policy import (
    PolicyLossOptions,
    clipped_surrogate,
    importance_ratio,
    k3_kl,
    policy_loss,
    sequence_mean,
    truncate_weight,
)
from headrace.engine.errors import ConfigError

PLAIN = PolicyLossOptions(importance_kind="none")


@dataclass(kw_only=True)
class Inputs:
    """One micro-batch by hand; everything but `logprobs` has a default."""

    logprobs: Tensor
    advantages: Tensor
    num_loss_tokens: int
    loss_mask: Tensor
    behaviour_logprobs: Tensor
    proximal_logprobs: Tensor
    sequence_ids: Tensor
    entropy: Tensor | None = None
    reference_logprobs: Tensor | None = None
    num_sequences: int = 1


def inputs(logprobs: Tensor, advantages: Tensor | None = None, **given: object) -> Inputs:
    n = logprobs.numel()
    values: dict[str, object] = {
        "advantages": torch.ones(n) if advantages is None else advantages,
        "num_loss_tokens": n,
        "loss_mask": torch.ones(n, dtype=torch.bool),
        "behaviour_logprobs": logprobs.detach(),
        "proximal_logprobs": logprobs.detach(),
        "sequence_ids": torch.zeros(n, dtype=torch.int64),
    }
    return Inputs(logprobs=logprobs, **{**values, **given})  # type: ignore[arg-type]


def test_token_mean_microbatch_loss_and_gradient_do_not_depend_on_the_cut() -> None:
    # With ratio 1 the loss of a token is -advantage * w, for the policy, the KL and the entropy term alike.
    costs = [[1.0] * 8, [5.0] * 2, [3.0] * 2]
    for split in ([[0, 1, 2]], [[0], [1, 2]], [[0], [1], [2]], [[0, 1], [2]]):
        w = torch.tensor(1.0, requires_grad=True)
        total = 0.0
        for part in split:
            cost = torch.tensor([c for index in part for c in costs[index]])
            logprobs = w.log().expand(len(cost))  # current ratio = w against a proximal policy of log 1
            batch = inputs(logprobs, -cost, num_loss_tokens=12, proximal_logprobs=torch.zeros(len(cost)))
            loss = policy_loss(batch, PLAIN).loss
            loss.backward()
            total += loss.item()
        assert total == pytest.approx(2.0)
        assert w.grad is not None and w.grad.item() == pytest.approx(2.0)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_token_mean_ranks_divide_by_the_tokens_of_all(num_ranks: int) -> None:
    """Nine tokens of 1 and one of 11, on however many ranks: summed over them 2, and never 6."""
    tokens = [1.0] * 9 + [11.0]
    costs = [tokens[:9], tokens[9:]] if num_ranks == 2 else [tokens[rank::num_ranks] for rank in range(num_ranks)]
    losses, gradients = [], []
    for rank in costs:
        w = torch.tensor(1.0, requires_grad=True)
        batch = inputs(
            w.log().expand(len(rank)),
            -torch.tensor(rank),
            num_loss_tokens=10,
            proximal_logprobs=torch.zeros(len(rank)),
        )
        loss = policy_loss(batch, PLAIN).loss
        loss.backward()
        assert w.grad is not None
        losses.append(loss.item())
        gradients.append(w.grad.item())
    assert sum(losses) == pytest.approx(2.0) and sum(gradients) == pytest.approx(2.0)
    if num_ranks == 2:
        assert losses == pytest.approx([0.9, 1.1])


def test_token_mean_microbatch_covers_the_kl_and_entropy_terms() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(12, generator=generator)
    options = PolicyLossOptions(kl_coef=0.3, entropy_coef=0.2)
    gradients = []
    for split in ([slice(0, 12)], [slice(0, 8), slice(8, 12)], [slice(0, 1), slice(1, 9), slice(9, 12)]):
        leaf = values.clone().requires_grad_()
        for part in split:
            batch = inputs(
                leaf[part],
                values[part],
                num_loss_tokens=12,
                entropy=leaf[part] ** 2,
                reference_logprobs=values[part] + 1,
            )
            policy_loss(batch, options).loss.backward()
        gradients.append(leaf.grad)
    for other in gradients[1:]:
        torch.testing.assert_close(gradients[0], other)


def test_k3_overflow_saturates_without_poisoning_value_or_gradient() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logp = torch.zeros(3, dtype=dtype, requires_grad=True)
        values = k3_kl(logp, torch.tensor([0.5, -0.5, 120.0], dtype=dtype))
        values.sum().backward()
        assert values[:2].tolist() == pytest.approx([0.148721, 0.106531], abs=1e-6)
        assert values.isfinite().all()
        assert logp.grad is not None and logp.grad.isfinite().all()
        assert logp.grad[:2].tolist() == pytest.approx(
            [-0.648721, 0.393469], abs=1e-6 if dtype == torch.float32 else 4e-3
        )


def test_k3_overflow_leaves_every_parameter_finite_after_an_optimizer_step() -> None:
    logp = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([logp], lr=0.1)
    batch = inputs(logp, reference_logprobs=torch.tensor([0.5, -0.5, 120.0]))
    policy_loss(batch, PolicyLossOptions(kl_coef=0.1)).loss.backward()
    optimizer.step()
    assert logp.isfinite().all()


@pytest.mark.parametrize("kind", ["tis", "mask", "none"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_all_masked_gives_a_connected_zero_whatever_stands_under_the_mask(kind: str, level: str) -> None:
    leaf = torch.full((3,), 2.0, requires_grad=True)
    nan = torch.full((3,), float("nan"))
    batch = inputs(
        leaf,
        nan,
        loss_mask=torch.zeros(3, dtype=torch.bool),
        behaviour_logprobs=torch.full((3,), float("-inf")),
        proximal_logprobs=nan,
        reference_logprobs=nan,
        entropy=leaf * 2,
        num_loss_tokens=5,
    )
    options = PolicyLossOptions(importance_kind=kind, importance_level=level, kl_coef=0.1, entropy_coef=0.1)  # type: ignore[arg-type]
    output = policy_loss(batch, options)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert leaf.grad is not None and leaf.grad.tolist() == [0.0, 0.0, 0.0]
    assert all(value.item() == 0.0 for value in [*output.sums.values(), *output.maxima.values()])


def test_all_masked_holds_for_a_micro_batch_of_no_tokens_in_a_step_of_no_tokens() -> None:
    leaf = torch.zeros(0, requires_grad=True)
    output = policy_loss(inputs(leaf, num_loss_tokens=0), PolicyLossOptions(importance_level="sequence"))
    output.loss.backward()
    assert output.loss.item() == 0.0


def test_masked_tokens_take_no_part_in_loss_gradient_or_metrics() -> None:
    # An appended end token has no score of its own: its entry is never used in a ratio, KL or entropy.
    mask = torch.tensor([True, True, True, False])
    leaf = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    behaviour = torch.tensor([-1.1, -1.9, -0.5, float("nan")])
    output = policy_loss(
        inputs(leaf, loss_mask=mask, behaviour_logprobs=behaviour, num_loss_tokens=3), PolicyLossOptions()
    )
    output.loss.backward()
    short = policy_loss(inputs(leaf.detach()[:3], behaviour_logprobs=behaviour[:3]), PolicyLossOptions())
    assert output.loss.item() == pytest.approx(short.loss.item())
    assert output.sums.keys() == short.sums.keys()
    for name, value in output.sums.items():
        assert value.item() == pytest.approx(short.sums[name].item()), name
    assert leaf.grad is not None and leaf.grad[3].item() == 0.0 and leaf.grad[:3].abs().min() > 0


def test_sequence_weight_length_keeps_a_harmless_gap_harmless() -> None:
    gap = torch.full((2000,), -0.001)
    mask, ids = torch.ones(2000, dtype=torch.bool), torch.zeros(2000, dtype=torch.int64)
    weight = truncate_weight(importance_ratio(gap, mask, ids, level="sequence"), kind="tis", cap=2.0)
    assert weight.tolist() == pytest.approx([0.999] * 2000, abs=1e-6)


def test_sequence_mean_ignores_masked_tokens_and_other_sequences() -> None:
    values = torch.tensor([1.0, 3.0, 100.0, 10.0, float("nan")])
    mask = torch.tensor([True, True, False, True, False])
    ids = torch.tensor([0, 0, 0, 1, 2])
    assert sequence_mean(values, mask, ids).tolist() == [2.0, 2.0, 2.0, 10.0, 0.0]


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, -1.465683), (-1.0, 1.822119)])
def test_decoupled_three_policies_all_matter(advantage: float, expected: float) -> None:
    options = PolicyLossOptions(clip_high=0.2, importance_cap=1e9)
    batch = inputs(
        torch.tensor([-1.4], requires_grad=True),
        torch.tensor([advantage]),
        behaviour_logprobs=torch.tensor([-2.0]),
        proximal_logprobs=torch.tensor([-1.8]),
    )
    assert policy_loss(batch, options).loss.item() == pytest.approx(expected, abs=1e-6)


def test_decoupled_three_policies_keep_the_behaviour_weight_at_ratio_one() -> None:
    leaf = torch.tensor([-1.8], requires_grad=True)
    batch = inputs(leaf, behaviour_logprobs=torch.tensor([-2.0]))
    output = policy_loss(batch, PolicyLossOptions(importance_cap=1e9))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-1.221403, abs=1e-6)
    assert leaf.grad is not None and leaf.grad.item() == pytest.approx(-1.221403, abs=1e-6)


def test_clip_table_with_and_without_dual_clip() -> None:
    ratios = torch.tensor([1.5, 0.5, 0.5, 1.5, 5.0, 5.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 1.0])
    for dual_clip, fifth, without_gradient in ((3.0, 3.0, [0, 2, 4, 5]), (None, 5.0, [0, 2, 5])):
        leaf = ratios.log().requires_grad_()
        loss, clipped = clipped_surrogate(leaf, advantages, PolicyLossOptions(dual_clip=dual_clip))
        loss.sum().backward()
        assert loss.tolist() == pytest.approx([-1.28, -0.5, 0.8, 1.5, fifth, -1.28], abs=1e-5)
        assert leaf.grad is not None and (leaf.grad == 0).nonzero().flatten().tolist() == without_gradient
        assert clipped.nonzero().flatten().tolist() == without_gradient


@pytest.mark.parametrize("constant", [1.0, 0.5, float("nan")])
def test_clip_table_rejects_a_dual_clip_that_is_not_above_one(constant: float) -> None:
    with pytest.raises(ConfigError, match="above 1"):
        PolicyLossOptions(dual_clip=constant)


@pytest.mark.parametrize("advantages", [[1.0, -1.0], [-1.0, 1.0]])
def test_ratio_exponent_bound_is_on_the_mean_of_a_sequence(advantages: list[float]) -> None:
    mask, ids = torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    leaf = torch.nn.Parameter(torch.tensor([90.0, -90.0, 400.0, 400.0]))
    means = sequence_mean(leaf, mask, ids)
    per_token = torch.tensor(advantages).repeat_interleave(2)
    loss, _ = clipped_surrogate(means, per_token, PolicyLossOptions())
    assert loss[:2].tolist() == [-advantages[0]] * 2  # the ratio is exactly 1
    optimizer = torch.optim.AdamW([leaf], lr=0.1)
    loss.sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all() and (leaf.grad[:2] != 0).all()
    optimizer.step()
    assert loss.isfinite().all() and leaf.isfinite().all()
    correction = importance_ratio(leaf.detach().new_tensor([90.0, -90.0, 400.0, 400.0]), mask, ids, level="sequence")
    assert correction[:2].tolist() == [1.0, 1.0] and correction.isfinite().all()


def test_importance_kinds_differ_only_above_the_cap() -> None:
    raw = torch.tensor([0.5, 2.0, 8.0])
    assert truncate_weight(raw, kind="tis", cap=2.0).tolist() == [0.5, 2.0, 2.0]
    assert truncate_weight(raw, kind="mask", cap=2.0).tolist() == [0.5, 2.0, 0.0]
    assert truncate_weight(raw, kind="none", cap=2.0).tolist() == [1.0, 1.0, 1.0]


def test_metrics_show_the_mismatch_and_the_weight_before_truncation() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    batch = inputs(logprobs, behaviour_logprobs=torch.tensor([-1.0, -1.0 - torch.log(torch.tensor(8.0)).item()]))
    output = policy_loss(batch, PolicyLossOptions())
    assert output.sums["importance_raw"].item() == pytest.approx(9.0)
    assert output.sums["importance_weight"].item() == pytest.approx(3.0)
    assert output.maxima["importance_raw"].item() == pytest.approx(8.0)
    assert output.sums["mismatch_kl"].item() == pytest.approx(-2.0794, abs=1e-4)
    assert output.sums["clipfrac"].item() == 0 and output.sums["ppo_kl"].item() == 0
