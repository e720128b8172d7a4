"""The FSDP trainer on one rank against a plain reference: the same update, skips, checkpoints, published weights."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from headrace.actors.learner.algorithms.grpo import Grpo
from headrace.actors.learner.checkpoint import CheckpointStore, find_latest
from headrace.actors.learner.fsdp_trainer import FsdpTrainer
from headrace.actors.learner.packing import build_micro_batch
from headrace.actors.models import load_causal_lm
from headrace.actors.tiny import build_tiny_model
from headrace.engine.config import Config, LearnerConfig, ModelConfig
from headrace.engine.errors import ConfigError, FormatError, InputError, NonFiniteStreakError, StorageError
from headrace.engine.interfaces import TrainerBackend
from headrace.engine.types import (
    FinishReason,
    MicroBatch,
    PolicyVersion,
    StepBatch,
    Trajectory,
    VersionSpan,
)
from headrace.engine.weights.payload import open_payload, verify_payload

# The large epsilon makes Adam's first step smooth in the gradient: with a small one, a gradient that is rounding noise
# moves its weight as far as any other.
LEARNER = LearnerConfig(
    device="cpu",
    threads=1,
    mixed_precision="no",
    learning_rate=1e-3,
    weight_decay=0.1,
    max_grad_norm=0.5,
    adam_eps=1e-2,
)
Build = Callable[..., FsdpTrainer]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture
def build(model_dir: Path, tmp_path: Path) -> Iterator[Build]:
    made: list[FsdpTrainer] = []

    def make(learner: LearnerConfig = LEARNER, dtype: str = "float32", **given: object) -> FsdpTrainer:
        for trainer in made:
            trainer.close()
        config = Config(learner=learner, model=ModelConfig(dtype=dtype))  # type: ignore[arg-type]
        made.append(
            FsdpTrainer.from_config(
                config,
                model_dir,
                algorithm=Grpo(config.algorithm),
                rank=0,
                num_ranks=1,
                init_method=f"file://{tmp_path}/meet-{len(made)}",
                **given,  # type: ignore[arg-type]
            )
        )
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()
        trainer.close()


def record(index: int, prompt: list[int], response: list[int], logprob: float = -5.0) -> Trajectory:
    size = len(response)
    return Trajectory(
        record_id=f"g/{index}/0",
        group_id="g",
        prompt_id="p",
        sample_index=index,
        group_size=4,
        attempt=0,
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        response_token_ids=np.array(response, dtype=np.int32),
        logprobs=np.full(size, logprob, dtype=np.float32),
        loss_mask=np.ones(size, dtype=np.uint8),
        spans=(VersionSpan(PolicyVersion(0, 0), size),),
        finish_reason=FinishReason.STOP,
        temperature=0.8,
    )


RECORDS = [record(i, [1, 2, 3, 4], [10 + i] * (i + 2)) for i in range(4)]
ADVANTAGES = [1.0, -0.5, 0.25, -0.75]


def batch(step: int = 0, split: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),)) -> StepBatch:
    micro_batches = [
        build_micro_batch([RECORDS[i] for i in part], [ADVANTAGES[i] for i in part], step) for part in split
    ]
    return step_of(micro_batches, step)


def step_of(micro_batches: list[MicroBatch], step: int) -> StepBatch:
    tokens = sum(int(micro_batch.loss_mask.sum()) for micro_batch in micro_batches)
    return StepBatch(
        step=step, micro_batches=tuple(micro_batches), num_loss_tokens=tokens, num_sequences=4, num_groups=1
    )


def poisoned(step: int) -> StepBatch:
    (micro_batch,) = batch(step).micro_batches
    bad = np.where(micro_batch.loss_mask != 0, np.float32(np.nan), np.float32(0))
    return step_of([msgspec.structs.replace(micro_batch, advantages=bad)], step)


def weights(trainer: FsdpTrainer) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor().clone() for name, value in trainer._tensors().items()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], msg=name, **(tolerance or {"atol": 0, "rtol": 0}))


def test_a_step_equals_a_plain_update_written_out_by_hand(build: Build, model_dir: Path) -> None:
    trainer = build()
    assert isinstance(trainer, TrainerBackend)
    result = trainer.step(batch())

    model = load_causal_lm(model_dir)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.1)
    total = torch.zeros(())
    count = sum(len(r.response_token_ids) for r in RECORDS)
    for r, advantage in zip(RECORDS, ADVANTAGES, strict=True):
        ids = torch.from_numpy(np.concatenate([r.prompt_token_ids, r.response_token_ids]).astype(np.int64))
        log_p = (model(ids[None], use_cache=False).logits[0] / 0.8).log_softmax(-1)[3:-1]
        current = log_p.gather(-1, ids[4:, None]).squeeze(-1)
        weight = (current.detach() + 5.0).exp().clamp(max=2.0)
        total = total - (weight * advantage * (current - current.detach()).exp()).sum() / count
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    adam.step()

    assert result.version == PolicyVersion(0, 1) and not result.skipped
    assert result.metrics["actor/pg_loss"] == pytest.approx(total.item(), rel=1e-4)
    assert result.metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    trained = weights(trainer)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[f"model.{name}"], parameter.detach(), atol=1e-6, rtol=1e-5, msg=name)


def test_token_mean_microbatch_the_update_does_not_depend_on_the_cut(build: Build) -> None:
    results, states = [], []
    for split in (((0, 1, 2, 3),), ((0,), (1, 2, 3)), ((3, 1), (), (0, 2))):
        trainer = build()
        results.append(trainer.step(batch(split=split)))
        states.append(weights(trainer))
    for other, result in zip(states[1:], results[1:], strict=True):
        assert_same(states[0], other, atol=1e-6, rtol=1e-5)
        for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "mismatch_kl/mean", "importance/weight_mean"):
            assert result.metrics[name] == pytest.approx(results[0].metrics[name], rel=1e-4), name


def test_a_step_reports_the_metrics_of_the_field(build: Build) -> None:
    metrics = build().step(batch()).metrics
    expected = "actor/pg_loss actor/entropy actor/ppo_kl actor/pg_clipfrac actor/grad_norm actor/lr mismatch_kl/mean "
    expected += "importance/weight_mean importance/raw_mean importance/weight_max perf/tokens perf/tokens_computed "
    expected += "actor/loss importance/ess importance/gap_abs_mean importance/rejected_fraction"
    assert set(metrics) == set(expected.split())
    assert metrics["actor/ppo_kl"] == 0.0 and metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["importance/weight_mean"] <= 2.0 and metrics["importance/weight_max"] > 0
    assert metrics["perf/tokens_computed"] < metrics["perf/tokens"]


def test_the_learning_rate_warms_up_linearly_and_skips_do_not_count(build: Build) -> None:
    trainer = build(msgspec.structs.replace(LEARNER, warmup_steps=2))
    rates = [trainer.step(b).metrics["actor/lr"] for b in (batch(0), poisoned(1), batch(2), batch(3))]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])


def test_nonfinite_grad_changes_nothing_names_the_records_and_ends_the_run_after_a_streak(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build(msgspec.structs.replace(LEARNER, max_nonfinite_steps=3))
    trainer.step(batch(0))
    before = weights(trainer)
    with caplog.at_level(logging.WARNING):
        result = trainer.step(poisoned(1))
    assert result.skipped and result.version == PolicyVersion(0, 2)
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert "g/0/0, g/1/0, g/2/0, g/3/0" in caplog.text
    assert_same(before, weights(trainer))
    trainer.step(poisoned(2))
    trainer.step(batch(3))  # a good step ends the streak
    trainer.step(poisoned(4))
    trainer.step(poisoned(5))
    with pytest.raises(NonFiniteStreakError, match="max_nonfinite_steps allows 3"):
        trainer.step(poisoned(6))


def test_all_masked_a_step_without_a_loss_token_is_skipped(build: Build) -> None:
    trainer = build()
    before = weights(trainer)
    result = trainer.step(step_of([build_micro_batch([], [], 0)], 0))
    assert result.skipped and result.version == PolicyVersion(0, 1)
    assert_same(before, weights(trainer))


def test_steps_go_forward_only(build: Build) -> None:
    trainer = build(version=PolicyVersion(2, 5))
    assert trainer.step(batch(5)).version == PolicyVersion(2, 6)
    with pytest.raises(InputError, match="steps go forward"):
        trainer.step(batch(5))


def test_the_same_steps_give_the_same_bits(build: Build) -> None:
    states = []
    for _ in range(2):
        trainer = build()
        for step in range(2):
            trainer.step(batch(step, split=((0, 1), (2, 3))))
        states.append(weights(trainer))
    assert_same(*states)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_exported_keyframe_is_the_master_weights_cast_under_the_checkpoints_names(
    build: Build, model_dir: Path, tmp_path: Path, dtype: str
) -> None:
    trainer = build(dtype=dtype, run_id="r")
    trainer.step(batch())
    update = trainer.export_update(None, tmp_path)
    verify_payload(update)
    assert update.manifest.version == PolicyVersion(0, 1) and update.manifest.run_id == "r"
    masters = weights(trainer)
    loaded = dict(load_causal_lm(model_dir).named_parameters())
    exported = open_payload(update)
    assert exported.keys() == loaded.keys()
    for name, (spec, bits) in exported.items():
        assert spec.dtype == dtype
        expected = masters[f"model.{name}"].to(getattr(torch, dtype))
        raw = torch.uint16 if dtype == "bfloat16" else torch.uint32
        assert np.array_equal(bits, expected.view(raw).numpy()), name


def test_logprobs_score_the_current_policy_and_agree_with_what_the_model_says(build: Build, model_dir: Path) -> None:
    (micro_batch,) = batch().micro_batches
    trainer = build()
    scores = trainer.logprobs(micro_batch)
    assert scores.dtype == np.float32 and (scores[micro_batch.loss_mask == 0] == 0).all()
    ids = torch.from_numpy(micro_batch.token_ids[:6].astype(np.int64))
    log_p = (load_causal_lm(model_dir)(ids[None], use_cache=False).logits[0] / 0.8).log_softmax(-1)
    assert scores[4:6] == pytest.approx([log_p[3, 10].item(), log_p[4, 10].item()], abs=2e-5)
    trainer.step(batch())
    assert not np.array_equal(scores, trainer.logprobs(micro_batch))


def test_a_run_continues_from_a_checkpoint_bit_for_bit(build: Build, tmp_path: Path) -> None:
    trainer = build(msgspec.structs.replace(LEARNER, warmup_steps=3))
    trainer.step(batch(0))
    CheckpointStore(tmp_path / "checkpoints", keep=2, rank=0).save(trainer, 1, {"hub.json": b"{}"})
    trainer.step(batch(1))
    expected = weights(trainer)

    resumed = build(msgspec.structs.replace(LEARNER, warmup_steps=3), version=PolicyVersion(1, 1))
    folder = find_latest(tmp_path / "checkpoints")
    assert folder is not None and (folder / "hub.json").read_bytes() == b"{}"
    resumed.load(folder)
    assert resumed.version == PolicyVersion(1, 1)
    assert resumed.step(batch(1)).metrics["actor/lr"] == pytest.approx(2e-3 / 3)
    assert_same(expected, weights(resumed))


def test_a_checkpoint_holds_nothing_that_could_be_executed(build: Build, tmp_path: Path) -> None:
    build().save(tmp_path / "c")
    assert {path.suffix for path in (tmp_path / "c").iterdir()} == {".safetensors", ".json"}


def test_a_damaged_or_foreign_checkpoint_is_refused(build: Build, tmp_path: Path) -> None:
    trainer = build()
    with pytest.raises(FormatError, match="not a complete checkpoint"):
        trainer.load(tmp_path)
    trainer.save(tmp_path / "c")
    file = next((tmp_path / "c").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FormatError, match="cut short"):
        trainer.load(tmp_path / "c")


def test_an_exported_checkpoint_loads_as_a_plain_model(build: Build, tmp_path: Path) -> None:
    trainer = build()
    trainer.step(batch())
    trainer.export_hf(tmp_path / "hf")
    trained = weights(trainer)
    for name, parameter in load_causal_lm(tmp_path / "hf").named_parameters():
        assert torch.equal(parameter, trained[f"model.{name}"]), name


def test_bfloat16_compute_keeps_float32_masters_and_comes_close(build: Build) -> None:
    exact = build().step(batch()).metrics
    trainer = build(msgspec.structs.replace(LEARNER, mixed_precision="bf16"))
    metrics = trainer.step(batch()).metrics
    assert all(value.dtype == torch.float32 for value in weights(trainer).values())
    for name in ("actor/entropy", "importance/weight_mean"):
        assert metrics[name] == pytest.approx(exact[name], rel=0.05)


def test_what_the_trainer_cannot_do_is_refused_at_the_start(model_dir: Path, tmp_path: Path) -> None:
    config = Config(learner=msgspec.structs.replace(LEARNER, mixed_precision="fp16"))
    with pytest.raises(ConfigError, match="loss scaling"):
        FsdpTrainer.from_config(
            config,
            model_dir,
            algorithm=Grpo(config.algorithm),
            rank=0,
            num_ranks=1,
            init_method=f"file://{tmp_path}/meet",
        )


def test_a_checkpoint_that_cannot_be_written_leaves_the_earlier_one(build: Build, tmp_path: Path) -> None:
    trainer = build()
    store = CheckpointStore(tmp_path, keep=1, rank=0)
    first = store.save(trainer, 1)

    class FullDisk:
        def save(self, folder: Path) -> None:
            (folder / "half").write_bytes(b"x")
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        store.save(FullDisk(), 2)  # type: ignore[arg-type]
    assert find_latest(tmp_path) == first
    assert store.save(trainer, 3) == find_latest(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "step"))] == ["step-00000003"]
