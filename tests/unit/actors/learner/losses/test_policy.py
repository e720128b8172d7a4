"""The clipped policy loss: three policies, corrections, KL and entropy terms."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.actors.learner.loss_inputs import TensorLossInputs
from headrace.actors.learner.losses.normalization import Normalization
from headrace.actors.learner.losses.policy import PolicyLossOptions, clipped_surrogate, policy_loss
from headrace.engine.config.algorithm import AlgorithmConfig, ImportanceConfig, KlConfig
from headrace.engine.errors import ConfigError, InputError

PLAIN = PolicyLossOptions(importance=ImportanceConfig(kind="none"))
UNCAPPED = ImportanceConfig(cap=1e9)


def inputs(logprobs: Tensor, advantages: Tensor | None = None, **given: Any) -> TensorLossInputs:
    """One micro-batch by hand; everything but `logprobs` has a default."""
    n = logprobs.numel()
    values: dict[str, Any] = {
        "advantages": torch.ones(n) if advantages is None else advantages,
        "loss_mask": torch.ones(n, dtype=torch.bool),
        "behaviour_logprobs": logprobs.detach(),
        "proximal_logprobs": logprobs.detach(),
        "sequence_ids": torch.zeros(n, dtype=torch.int64),
        "entropy": None,
        "reference_logprobs": None,
        "teacher_logprobs": None,
        "group_ids": None,
        "kl_coef": 0.0,
        "num_loss_tokens": n,
        "num_sequences": 1,
        "num_groups": 1,
    }
    return TensorLossInputs(logprobs=logprobs, **{**values, **given})


def test_token_mean_microbatch_loss_and_gradient_do_not_depend_on_the_cut() -> None:
    """K-001: with ratio 1 the loss of a token is -advantage * w."""
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
    """K-002: nine tokens of 1 and one of 11, on however many ranks: summed over them 2, and never 6."""
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


def test_k3_overflow_in_the_whole_loss_leaves_every_parameter_finite() -> None:
    """K-010, through the policy loss and one optimizer step."""
    logp = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([logp], lr=0.1)
    batch = inputs(logp, reference_logprobs=torch.tensor([0.5, -0.5, 120.0]), kl_coef=0.1)
    policy_loss(batch, PolicyLossOptions()).loss.backward()
    optimizer.step()
    assert logp.isfinite().all()


def test_all_masked_holds_for_a_micro_batch_of_no_tokens_in_a_step_of_no_tokens() -> None:
    """K-011, without even a column for the KL and entropy terms that are asked for."""
    leaf = torch.zeros(0, requires_grad=True)
    options = PolicyLossOptions(importance=ImportanceConfig(level="sequence"), entropy_coef=0.1)
    output = policy_loss(inputs(leaf, num_loss_tokens=0, kl_coef=0.1), options)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert {"kl", "entropy"} <= output.sums.keys()  # ranks add up the same names


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, -1.465683), (-1.0, 1.822119)])
def test_decoupled_three_policies_all_matter(advantage: float, expected: float) -> None:
    """K-038."""
    options = PolicyLossOptions(clip_high=0.2, importance=UNCAPPED)
    batch = inputs(
        torch.tensor([-1.4], requires_grad=True),
        torch.tensor([advantage]),
        behaviour_logprobs=torch.tensor([-2.0]),
        proximal_logprobs=torch.tensor([-1.8]),
    )
    assert policy_loss(batch, options).loss.item() == pytest.approx(expected, abs=1e-6)


def test_decoupled_three_policies_keep_the_behaviour_weight_at_ratio_one() -> None:
    """K-038: the first update of a step."""
    leaf = torch.tensor([-1.8], requires_grad=True)
    batch = inputs(leaf, behaviour_logprobs=torch.tensor([-2.0]))
    output = policy_loss(batch, PolicyLossOptions(importance=UNCAPPED))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-1.221403, abs=1e-6)
    assert leaf.grad is not None and leaf.grad.item() == pytest.approx(-1.221403, abs=1e-6)


def test_clip_table_with_and_without_dual_clip() -> None:
    """K-065."""
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
    """K-065."""
    with pytest.raises(ConfigError, match="above 1"):
        PolicyLossOptions(dual_clip=constant)


def test_a_negative_clip_range_and_k1_as_a_loss_are_refused() -> None:
    """K-084: k1 in the loss has a gradient that averages to 0."""
    with pytest.raises(ConfigError, match="below 0"):
        PolicyLossOptions(clip_low=-0.1)
    with pytest.raises(ConfigError, match="averages to 0"):
        PolicyLossOptions(kl_estimator="k1")
    with pytest.raises(ConfigError, match="averages to 0"):
        PolicyLossOptions.from_config(AlgorithmConfig(kl=KlConfig(estimator="k1")), unit="token")


def test_options_come_from_a_configuration() -> None:
    config = AlgorithmConfig(
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=3.0,
        entropy_coef=0.01,
        length_constant=100,
        importance=ImportanceConfig(level="sequence", fixed_denominator=True),
        kl=KlConfig(estimator="k1", place="reward"),
    )
    assert PolicyLossOptions.from_config(config, unit="constant") == PolicyLossOptions(
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=3.0,
        entropy_coef=0.01,
        importance=config.importance,
        normalization=Normalization(unit="constant", length=100, fixed=True),
        kl_estimator=None,
    )
    plain = PolicyLossOptions.from_config(AlgorithmConfig(normalization="sequence"), unit="token")
    assert plain.normalization.unit == "sequence"  # an explicit setting wins
    assert plain.dual_clip is None and plain.kl_estimator == "k3"


def test_kl_once_is_in_the_loss_only_where_it_is_asked_for() -> None:
    """K-085: with the KL in the reward the coefficient does not reach the loss; the figure is measured all the same."""
    logprobs, reference = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -1.5])
    in_loss = PolicyLossOptions(importance=ImportanceConfig(kind="none"))
    in_reward = PolicyLossOptions(importance=ImportanceConfig(kind="none"), kl_estimator=None)
    k3 = math.exp(-0.5) + 0.5 - 1
    batch = inputs(logprobs, reference_logprobs=reference, kl_coef=0.1)
    assert policy_loss(batch, in_loss).loss.item() == pytest.approx(-1.0 + 0.1 * k3)
    assert policy_loss(batch, in_reward).loss.item() == pytest.approx(-1.0)
    for options in (in_loss, in_reward):
        assert policy_loss(batch, options).sums["kl"].item() == pytest.approx(2 * k3)


@pytest.mark.parametrize("estimator", ["k2", "k3", "unbiased"])
def test_kl_once_has_the_sign_that_pulls_towards_the_reference(estimator: Any) -> None:
    """K-085: above the reference the term lowers a log-probability, below it raises one."""
    leaf = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = inputs(leaf, torch.zeros(2), reference_logprobs=torch.tensor([-1.5, -1.5]), kl_coef=0.1)
    policy_loss(batch, PolicyLossOptions(kl_estimator=estimator)).loss.backward()
    assert leaf.grad is not None and leaf.grad[0] > 0 > leaf.grad[1]


@pytest.mark.parametrize("kind", ["tis", "none"])
def test_the_unbiased_kl_is_weighed_from_the_sampler_to_the_current_policy(kind: Any) -> None:
    leaf = torch.tensor([-1.0, -1.0], requires_grad=True)
    batch = inputs(
        leaf,
        torch.zeros(2),
        proximal_logprobs=torch.tensor([-1.2, -1.2]),
        behaviour_logprobs=torch.tensor([-1.3, -2.9]),
        reference_logprobs=torch.tensor([-1.5, -1.5]),
        kl_coef=1.0,
        num_loss_tokens=1,
    )
    importance = ImportanceConfig(kind=kind)
    policy_loss(batch, PolicyLossOptions(importance=importance, kl_estimator="unbiased")).loss.backward()
    expected = [0.5 * math.exp(0.3), 0.5 * 2.0] if kind == "tis" else [0.5 * math.exp(0.2)] * 2
    assert leaf.grad is not None and leaf.grad.tolist() == pytest.approx(expected)


def test_terms_without_their_column_are_refused() -> None:
    leaf = torch.tensor([-1.0], requires_grad=True)
    with pytest.raises(InputError, match="no reference_logprobs"):
        policy_loss(inputs(leaf, kl_coef=0.1), PolicyLossOptions())
    with pytest.raises(InputError, match="no entropy"):
        policy_loss(inputs(leaf), PolicyLossOptions(entropy_coef=0.1))
    with pytest.raises(InputError, match="behaviour_logprobs has the shape"):
        policy_loss(inputs(leaf, behaviour_logprobs=torch.zeros(2)), PolicyLossOptions())


def test_reject_denominator_reports_what_left_the_mean() -> None:
    """K-035: kept costs 1 and 5 average to 3 once the trainer has rescaled; a wholly rejected sequence adds nothing."""
    high = math.log(8.0)  # above the cap
    gaps = torch.tensor([0.0, high, high, high, 0.0, high, high])
    costs = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 7.0])
    for unit in ("token", "sequence"):
        leaf = torch.full((7,), -1.0, requires_grad=True)
        batch = inputs(
            leaf,
            -costs,
            behaviour_logprobs=leaf.detach() - gaps,
            sequence_ids=torch.tensor([0] * 5 + [1] * 2),
            num_sequences=2,
            reference_logprobs=torch.full((7,), -2.0),
            entropy=leaf * 3,
            kl_coef=0.2,
        )
        options = PolicyLossOptions(
            importance=ImportanceConfig(kind="mask"), normalization=Normalization(unit=unit), entropy_coef=0.5
        )
        output = policy_loss(batch, options)
        output.loss.backward()
        factor = output.denominator / (output.denominator - output.rejected.item())
        regularizer = 0.2 * (math.exp(-1.0) + 1.0 - 1.0) + 0.5 * 3.0
        assert output.loss.item() * factor == pytest.approx(3.0 + regularizer)
        assert leaf.grad is not None and (leaf.grad != 0).tolist() == [True, False, False, False, True, False, False]
        assert output.sums["rejected"].item() == 5
        assert output.sums["pg_loss"].item() == pytest.approx(6.0)


def test_filter_then_truncate_drops_a_sequence_exactly() -> None:
    """K-067: kept weights 2 and 0.125; the dropped sequence gives 0 loss and 0 gradient, not NaN."""
    leaf = torch.zeros(4, requires_grad=True)
    batch = inputs(
        leaf,
        behaviour_logprobs=-torch.tensor([math.log(8.0), math.log(0.125), 200.0, 200.0]),
        sequence_ids=torch.tensor([0, 0, 1, 1]),
        num_loss_tokens=1,
    )
    options = PolicyLossOptions(importance=ImportanceConfig(cap=2.0, reject_below=0.5, reject_above=2.0))
    output = policy_loss(batch, options)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-2.125)
    assert leaf.grad is not None and leaf.grad.tolist() == pytest.approx([-2.0, -0.125, 0.0, 0.0])


def test_metrics_show_the_mismatch_and_the_weight_before_truncation() -> None:
    """K-036: the un-truncated weight stands beside the truncated one."""
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    batch = inputs(logprobs, behaviour_logprobs=torch.tensor([-0.9, -1.0 - math.log(8.0)]))
    output = policy_loss(batch, PolicyLossOptions())
    low = math.exp(-0.1)
    assert output.sums["importance_raw"].item() == pytest.approx(8.0 + low)
    assert output.sums["importance_weight"].item() == pytest.approx(2.0 + low)
    assert output.sums["importance_weight_sq"].item() == pytest.approx(4.0 + low**2)
    assert output.maxima["importance_raw"].item() == pytest.approx(8.0)
    assert output.sums["mismatch_kl"].item() == pytest.approx(0.1 - math.log(8.0), abs=1e-5)
    assert output.sums["mismatch_abs"].item() == pytest.approx(0.1 + math.log(8.0), abs=1e-5)
    assert output.sums["clipfrac"].item() == 0 and output.sums["ppo_kl"].item() == 0


def test_the_figure_ppo_kl_is_proximal_minus_current() -> None:
    batch = inputs(torch.tensor([-1.0, -2.0]), proximal_logprobs=torch.tensor([-1.5, -1.8]))
    assert policy_loss(batch, PLAIN).sums["ppo_kl"].item() == pytest.approx(-0.3)


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_bfloat16_columns_give_the_gradient_of_their_values(unit: Any) -> None:
    """3000 tokens of one sequence, credit 1: each has the gradient -1 / 3000, whatever the type of its column."""
    size = 3000
    logprobs = torch.full((size,), -1.0, dtype=torch.bfloat16, requires_grad=True)
    columns = inputs(logprobs, torch.ones(size, dtype=torch.bfloat16))
    output = policy_loss(columns, PolicyLossOptions(normalization=Normalization(unit=unit)))
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(-1.0)
    assert float(output.sums["importance_weight"]) == size
    assert logprobs.grad is not None
    assert logprobs.grad.float().tolist() == pytest.approx([-1 / size] * size, rel=2**-8)
