"""What holds of every loss: cuts, order, masked tokens, empty micro-batches."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.losses.cispo import cispo_loss
from headrace.actors.learner.losses.distillation import distillation_loss
from headrace.actors.learner.losses.gspo import gspo_loss
from headrace.actors.learner.losses.normalization import Normalization
from headrace.actors.learner.losses.policy import PolicyLossOptions, policy_loss
from headrace.actors.learner.losses.preference import preference_loss
from headrace.actors.learner.losses.supervised import supervised_loss
from headrace.actors.learner.losses.value import value_loss
from headrace.engine.config.algorithm import ImportanceConfig

BY_TOKEN = PolicyLossOptions(
    importance=ImportanceConfig(kind="mask", cap=1.3), kl_estimator="unbiased", entropy_coef=0.2
)
BY_SEQUENCE = PolicyLossOptions(
    importance=ImportanceConfig(level="sequence", reject_below=0.8, reject_above=1.25),
    normalization=Normalization(unit="sequence"),
    dual_clip=2.0,
    entropy_coef=0.2,
)
BY_CONSTANT = PolicyLossOptions(
    importance=ImportanceConfig(level="product", kind="mask", cap=1.2),
    normalization=Normalization(unit="constant", length=9),
    kl_estimator="k2",
)
Loss = Callable[[Any], Any]
POLICY_LOSSES: dict[str, Callable[..., Any]] = {
    "policy": policy_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "distillation": distillation_loss,
}
LOSSES: dict[str, Loss] = {
    f"{name}-{options.normalization.unit}": lambda inputs, f=function, o=options: f(inputs, o)
    for name, function in POLICY_LOSSES.items()
    for options in (BY_TOKEN, BY_SEQUENCE, BY_CONSTANT)
}
LOSSES |= {
    "value": lambda i: value_loss(
        i.logprobs,
        i.proximal_logprobs,
        i.teacher_logprobs,
        i.loss_mask,
        i.sequence_ids,
        clip_range=0.2,
        num_loss_tokens=i.num_loss_tokens,
        num_sequences=i.num_sequences,
    ),
    "supervised": supervised_loss,
    "preference": lambda i: preference_loss(i, beta=0.3),
}
every_loss = pytest.mark.parametrize("name", list(LOSSES))


def add_up(kit: Any, loss: Loss, parts: list[list[Any]], counts: dict[str, int]) -> Any:
    """A step over these micro-batches: loss and gradients rescaled, and the sums and maxima."""
    outcomes = [kit.run(loss, part, kl_coef=0.4, counts=counts) for part in parts]
    rejected = sum(o.rejected for o in outcomes)
    left = outcomes[0].denominator - rejected
    factor = outcomes[0].denominator / left if left else 0.0
    assert len({o.denominator for o in outcomes}) == 1
    return {
        "loss": factor * sum(o.loss for o in outcomes),
        "gradients": [factor * g for o in outcomes for g in o.gradients],
        "sums": {name: sum(o.sums[name] for o in outcomes) for name in outcomes[0].sums},
        "maxima": {name: max(o.maxima[name] for o in outcomes) for name in outcomes[0].maxima},
        "rejected": rejected,
    }


def assert_equal(kit: Any, one: Any, other: Any, order: list[int] | None = None) -> None:
    """Two steps did the same; `order` says where each sample of the first stands in the second."""
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-12)
    assert one["rejected"] == other["rejected"]
    for figures in ("sums", "maxima"):
        assert one[figures] == pytest.approx(other[figures], abs=1e-10)
    gradients = other["gradients"] if order is None else [other["gradients"][i] for i in order]
    kit.assert_same(one["gradients"], gradients, atol=1e-12)


@every_loss
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_token_mean_microbatch_the_cut_and_the_order_change_nothing(kit: Any, name: str, seed: int) -> None:
    """K-001, K-002, K-035: for each loss and normalisation, with rejections, KL and entropy terms."""
    samples = kit.draw(seed, pairs=True)
    counts = kit.counts(samples)
    whole = add_up(kit, LOSSES[name], [samples], counts)
    rng = np.random.default_rng(seed)
    pairs = rng.permutation(len(samples) // 2)
    order = [int(2 * p + k) for p in pairs for k in rng.permutation(2)]
    shuffled = [samples[i] for i in order]
    cut = 2 * int(rng.integers(0, len(pairs) + 1))
    where = np.argsort(order).tolist()
    parts = add_up(kit, LOSSES[name], [shuffled[:cut], [], shuffled[cut:]], counts)
    assert_equal(kit, whole, parts, where)


@every_loss
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_masked_tokens_on_either_side_change_nothing_even_if_not_a_number(kit: Any, name: str, seed: int) -> None:
    samples = kit.draw(seed, pairs=True)
    counts = kit.counts(samples)
    rng = np.random.default_rng(seed)
    widths = [(int(rng.integers(0, 4)), int(rng.integers(0, 4))) for _ in samples]
    padded = [s.with_masked(front=f, back=b) for s, (f, b) in zip(samples, widths, strict=True)]
    plain, wide = (add_up(kit, LOSSES[name], [rows], counts) for rows in (samples, padded))
    assert not any(gradient[~s.mask].any() for s, gradient in zip(padded, wide["gradients"], strict=True))
    wide["gradients"] = [g[f : len(g) - b] for g, (f, b) in zip(wide["gradients"], widths, strict=True)]
    assert_equal(kit, plain, wide)


@every_loss
def test_all_masked_gives_a_connected_zero_whatever_stands_under_the_mask(kit: Any, name: str) -> None:
    """K-011: not a number, infinite, or nothing at all."""
    masked = [s.with_masked(front=2) for s in kit.draw(0, pairs=True)]
    for junk in (np.nan, np.inf, -np.inf, 1e30):
        for rows in ([], masked[:1]):
            inputs = kit.pack(rows, kl_coef=0.1, counts={"num_loss_tokens": 7, "num_sequences": 3, "num_groups": 2})
            changed = {
                column: getattr(inputs, column).detach() * 0 + junk
                for column in ("proximal_logprobs", "behaviour_logprobs", "reference_logprobs", "teacher_logprobs")
            }
            columns = {f: getattr(inputs, f) for f in inputs.__slots__} | changed
            columns["loss_mask"] = inputs.loss_mask & False
            output = LOSSES[name](type(inputs)(**columns))
            output.loss.backward()
            assert output.loss.item() == 0.0 and output.rejected.item() == 0.0
            assert inputs.logprobs.grad is not None and not inputs.logprobs.grad.any()
            assert all(figure.item() == 0.0 for figure in [*output.sums.values(), *output.maxima.values()])


@every_loss
def test_figures_are_detached_scalars_and_the_loss_is_connected(kit: Any, name: str) -> None:
    output = LOSSES[name](kit.pack(kit.draw(2, pairs=True), kl_coef=0.1))
    assert output.loss.ndim == 0 and output.loss.requires_grad
    for figure in [*output.sums.values(), *output.maxima.values(), output.rejected]:
        assert figure.ndim == 0 and not figure.requires_grad and figure.isfinite()
    assert 0 <= output.rejected.item() <= output.denominator


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_only_the_current_policy_gets_a_gradient(kit: Any, name: str) -> None:
    """The samples are given: neither sampler nor anchor, reference, teacher or credit is trained."""
    inputs = kit.pack(kit.draw(4), kl_coef=0.1)
    given_ = ("proximal_logprobs", "behaviour_logprobs", "reference_logprobs", "teacher_logprobs", "advantages")
    for column in given_:
        getattr(inputs, column).requires_grad_()
    POLICY_LOSSES[name](inputs, PolicyLossOptions(kl_estimator="unbiased")).loss.backward()
    assert inputs.logprobs.grad.nan_to_num().abs().sum() > 0
    assert [getattr(inputs, column).grad for column in given_] == [None] * len(given_)
