"""What the FSDP trainer makes of an algorithm's loss: rejected tokens, a reference model, an adaptive coefficient."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from headrace.actors.learner.algorithms.grpo import Grpo
from headrace.actors.learner.fsdp_trainer import FsdpTrainer
from headrace.actors.learner.packing import build_micro_batch
from headrace.actors.models import load_causal_lm
from headrace.actors.tiny import build_tiny_model
from headrace.engine.config import AlgorithmConfig, Config, ImportanceConfig, KlConfig, LearnerConfig, ModelConfig
from headrace.engine.types import FinishReason, PolicyVersion, StepBatch, Trajectory, VersionSpan

LEARNER = LearnerConfig(
    device="cpu", threads=1, mixed_precision="no", learning_rate=1e-3, max_grad_norm=1e9, adam_eps=1e-2
)
Build = Callable[..., FsdpTrainer]
Split = tuple[tuple[int, ...], ...]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def build(model_dir: Path, tmp_path: Path) -> Iterator[Build]:
    made: list[FsdpTrainer] = []

    def make(algorithm: AlgorithmConfig, learner: LearnerConfig = LEARNER) -> FsdpTrainer:
        for trainer in made:
            trainer.close()
        config = Config(learner=learner, algorithm=algorithm, model=ModelConfig(dtype="float32"))
        meet = f"file://{tmp_path}/meet-{len(made)}"
        method = Grpo(config.algorithm)
        made.append(FsdpTrainer.from_config(config, model_dir, algorithm=method, rank=0, num_ranks=1, init_method=meet))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def record(index: int, logprob: float) -> Trajectory:
    size = index + 2
    return Trajectory(
        record_id=f"g/{index}/0",
        group_id="g",
        prompt_id="p",
        sample_index=index,
        group_size=4,
        attempt=0,
        prompt_token_ids=np.array([1, 2, 3, 4], dtype=np.int32),
        response_token_ids=np.full(size, 10 + index, dtype=np.int32),
        logprobs=np.full(size, logprob, dtype=np.float32),
        loss_mask=np.ones(size, dtype=np.uint8),
        spans=(VersionSpan(PolicyVersion(0, 0), size),),
        finish_reason=FinishReason.STOP,
        temperature=1.0,
    )


ADVANTAGES = [1.0, -0.5, 0.25, -0.75]


def batch(step: int, split: Split = ((0, 1, 2, 3),), *, logprobs: tuple[float, ...] = (-5.0,) * 4) -> StepBatch:
    records = [record(index, logprob) for index, logprob in enumerate(logprobs)]
    parts = [build_micro_batch([records[i] for i in part], [ADVANTAGES[i] for i in part], step) for part in split]
    tokens = sum(int(part.loss_mask.sum()) for part in parts)
    return StepBatch(step=step, micro_batches=tuple(parts), num_loss_tokens=tokens, num_sequences=4, num_groups=1)


def weights(trainer: FsdpTrainer) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor().clone() for name, value in trainer._tensors().items()}


# The sampler of record 2 gave its tokens e^-60, so that their ratio is far above any cap.
STRANGE = (-5.0, -5.0, -60.0, -5.0)
MASKED = AlgorithmConfig(importance=ImportanceConfig(kind="mask", cap=1e4))


@pytest.mark.parametrize("split", [((0, 1, 2, 3),), ((2,), (0, 1, 3)), ((3, 1), (), (0, 2))])
def test_reject_denominator_rejected_tokens_leave_the_update_as_if_they_had_not_been_there(
    build: Build, split: Split
) -> None:
    """K-035: whatever the cut, the mean is over the tokens that were kept."""
    trainer = build(MASKED)
    result = trainer.step(batch(0, split, logprobs=STRANGE))
    assert result.metrics["importance/rejected_fraction"] == pytest.approx(4 / 14)
    after = weights(trainer)
    without = build(MASKED)
    (whole,) = batch(0, ((0, 1, 3),)).micro_batches
    expected = without.step(
        StepBatch(step=0, micro_batches=(whole,), num_loss_tokens=10, num_sequences=3, num_groups=1)
    )
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/loss"):
        assert result.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4), name
    for name, value in weights(without).items():
        torch.testing.assert_close(after[name], value, atol=1e-6, rtol=1e-5, msg=name)


def test_a_step_whose_tokens_are_all_rejected_changes_nothing_and_says_so(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build(MASKED)
    before = weights(trainer)
    result = trainer.step(batch(0, logprobs=(-60.0,) * 4))
    assert result.skipped and result.version == PolicyVersion(0, 1)
    assert "all of its 14 loss tokens were rejected" in caplog.text
    for name, value in weights(trainer).items():
        assert torch.equal(before[name], value), name


def test_the_kl_term_pulls_towards_the_model_that_the_run_began_with(build: Build, model_dir: Path) -> None:
    trainer = build(AlgorithmConfig(kl_coef=0.5))
    first = trainer.step(batch(0))
    assert first.metrics["actor/kl"] == pytest.approx(0.0, abs=1e-6)
    assert first.metrics["actor/kl_coef"] == 0.5

    # The second step, written out with a plain model that holds the weights after the first one.
    model, base = load_causal_lm(model_dir, "float32"), load_causal_lm(model_dir, "float32")
    model.load_state_dict(
        {name.removeprefix("model."): value for name, value in weights(trainer).items() if name.startswith("model.")},
        strict=False,
    )
    total = torch.zeros(())
    kl_sum = 0.0
    for index, advantage in enumerate(ADVANTAGES):
        sample = record(index, -5.0)
        ids = torch.from_numpy(np.concatenate([sample.prompt_token_ids, sample.response_token_ids]).astype(np.int64))
        current, reference = (
            m(ids[None], use_cache=False).logits[0].log_softmax(-1)[3:-1].gather(-1, ids[4:, None]).squeeze(-1)
            for m in (model, base)
        )
        gap = reference.detach() - current
        kl = gap.exp() - gap - 1
        weight = (current.detach() + 5.0).exp().clamp(max=2.0)
        total = total + (-weight * advantage * (current - current.detach()).exp() + 0.5 * kl).sum() / 14
        kl_sum += kl.detach().sum().item()
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    second = trainer.step(batch(1))
    assert second.metrics["actor/kl"] == pytest.approx(kl_sum / 14, rel=1e-3)
    assert second.metrics["actor/kl"] > 1e-6
    assert second.metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    assert second.metrics["actor/loss"] == pytest.approx(total.item(), rel=1e-3)


def test_an_adaptive_coefficient_moves_with_the_measured_distance_and_survives_a_checkpoint(
    build: Build, tmp_path: Path
) -> None:
    config = AlgorithmConfig(kl_coef=0.5, kl=KlConfig(target=10.0, horizon=5))
    trainer = build(config)
    used = [trainer.step(batch(step)).metrics["actor/kl_coef"] for step in range(3)]
    assert used == pytest.approx([0.5, 0.5 * 0.8, 0.5 * 0.8**2])
    trainer.save(tmp_path / "saved")
    resumed = build(config)
    resumed.load(tmp_path / "saved")
    assert resumed.step(batch(3)).metrics["actor/kl_coef"] == pytest.approx(0.5 * 0.8**3)


def test_a_reference_column_that_is_given_is_the_one_that_is_used(build: Build) -> None:
    """The trainer scores the reference itself; what an earlier stage wrote would be of another temperature or model."""
    (part,) = batch(0).micro_batches
    filled = msgspec.structs.replace(part, reference_logprobs=np.full(part.token_ids.size, -40.0, np.float32))
    whole = msgspec.structs.replace(batch(0), micro_batches=(filled,))
    assert build(AlgorithmConfig(kl_coef=0.5)).step(whole).metrics["actor/kl"] == pytest.approx(0.0, abs=1e-6)


def test_a_rate_that_follows_the_kl_falls_where_sampler_and_learner_are_far_apart(build: Build, tmp_path: Path) -> None:
    learner = msgspec.structs.replace(LEARNER, kl_target=1e-4)
    trainer = build(AlgorithmConfig(), learner)
    rates = [trainer.step(batch(step, logprobs=(-1.0,) * 4)).metrics["actor/lr"] for step in range(3)]
    assert rates == pytest.approx([1e-3, 1e-3 / 1.5, 1e-3 / 1.5**2])
    trainer.save(tmp_path / "saved")
    resumed = build(AlgorithmConfig(), learner)
    resumed.load(tmp_path / "saved")
    assert resumed.step(batch(3)).metrics["actor/lr"] == pytest.approx(1e-3 / 1.5**3)
