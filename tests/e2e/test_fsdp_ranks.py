"""The FSDP trainer on real gloo ranks: the same numbers on one, two and three of them."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.actors.learner.algorithms.grpo import Grpo
from headrace.actors.learner.checkpoint import CheckpointStore, find_latest
from headrace.actors.learner.fsdp_trainer import FsdpTrainer
from headrace.actors.learner.packing import build_micro_batch
from headrace.actors.tiny import build_tiny_model
from headrace.engine.config.schema import Config, LearnerConfig, ModelConfig
from headrace.engine.errors import NonFiniteStreakError
from headrace.engine.types import (
    FinishReason,
    PolicyVersion,
    StepBatch,
    Trajectory,
    VersionSpan,
    WeightManifest,
    WeightUpdate,
)
from headrace.engine.weights.payload import open_payload, verify_payload

NUM_RECORDS = 6
ADVANTAGES = [1.0, -0.5, 0.25, -0.75, 2.0, 0.125]


def run_ranks(num_ranks: int, scenario: str, model_dir: Path, folder: Path) -> list[dict[str, Any]]:
    """Run `scenario` in that many processes, and return what each wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meet").unlink(missing_ok=True)
    ranks = [start_rank(scenario, rank, num_ranks, model_dir, folder) for rank in range(num_ranks)]
    try:
        outputs = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors
    return [{**json.loads(out.splitlines()[-1]), "log": errors} for out, errors in outputs]


def start_rank(scenario: str, rank: int, num_ranks: int, model_dir: Path, folder: Path) -> "subprocess.Popen[str]":
    """One rank of a scenario."""
    argv = [sys.executable, __file__, scenario, str(rank), str(num_ranks), str(model_dir), str(folder)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[dict[str, Any]]]]:
    """Two steps on 1, 2 and 3 ranks, all from the same model."""
    model_dir = build_tiny_model(tmp_path_factory.mktemp("model"), "llama", tied=True)
    found = {}
    for num_ranks in (1, 2, 3):
        folder = tmp_path_factory.mktemp(f"ranks-{num_ranks}")
        found[num_ranks] = (folder, run_ranks(num_ranks, "train", model_dir, folder))
    return found


def published(folder: Path) -> dict[str, np.ndarray]:
    """The keyframe that all ranks of a folder wrote, joined."""
    parts = [
        msgspec.json.decode(path.read_bytes(), type=WeightManifest) for path in sorted(folder.glob("manifest-*.json"))
    ]
    joined = msgspec.structs.replace(
        parts[0],
        buckets=tuple(bucket for part in parts for bucket in part.buckets),
        digest=sum(part.digest for part in parts) % 2**64,
    )
    (payload,) = folder.glob("keyframe-*.bin")
    update = WeightUpdate(manifest=joined, local_path=str(payload))
    verify_payload(update)
    return {name: bits.view(np.float32) for name, (_, bits) in open_payload(update).items()}


@pytest.mark.timeout(300)
def test_token_mean_ranks_loss_gradient_and_update_are_those_of_one_rank(
    reports: dict[int, tuple[Path, list[dict[str, Any]]]],
) -> None:
    # Ranks hold different numbers of tokens, and one of three holds nothing but padding in its second micro-batch.
    folder, (alone,) = reports[1]
    weights = published(folder)
    for num_ranks in (2, 3):
        other_folder, ranks = reports[num_ranks]
        for report in ranks:
            assert report["metrics"] == ranks[0]["metrics"]  # equal bits on every rank
            for step, metrics in enumerate(report["metrics"]):
                for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "mismatch_kl/mean", "perf/tokens"):
                    assert metrics[name] == pytest.approx(alone["metrics"][step][name], rel=1e-4), (name, step)
        other = published(other_folder)
        assert other.keys() == weights.keys()
        for name, values in weights.items():
            np.testing.assert_allclose(other[name], values, atol=1e-6, rtol=1e-5, err_msg=name)


def test_every_rank_writes_only_its_own_shard(reports: dict[int, tuple[Path, list[dict[str, Any]]]]) -> None:
    folder, _ = reports[2]
    for path in folder.glob("manifest-*.json"):
        part = msgspec.json.decode(path.read_bytes(), type=WeightManifest)
        written = sum(bucket.count for bucket in part.buckets)
        assert written == sum(int(np.prod(spec.shape)) for spec in part.tensors) // 2
        assert "lm_head.weight" not in {spec.name for spec in part.tensors}  # tied, so published once


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.timeout(300)
def test_a_checkpoint_of_two_ranks_resumes_on_another_number_of_ranks(
    reports: dict[int, tuple[Path, list[dict[str, Any]]]], tmp_path: Path, num_ranks: int
) -> None:
    folder, (first, _) = reports[2]
    model_dir = build_tiny_model(tmp_path / "model", "llama", tied=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(folder / "checkpoints")
    for report in run_ranks(num_ranks, "resume", model_dir, tmp_path / "run"):
        assert report["version"] == [0, 2]
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
            assert report["metrics"][0][name] == pytest.approx(first["metrics"][1][name], rel=1e-4), name


@pytest.mark.timeout(300)
def test_nonfinite_grad_of_one_rank_skips_the_step_on_both_and_a_streak_ends_the_run(tmp_path: Path) -> None:
    model_dir = build_tiny_model(tmp_path / "model", "llama", tied=True)
    ranks = run_ranks(2, "poison", model_dir, tmp_path / "run")
    for report in ranks:
        assert report["skipped"] == [False, True, False, True, True]
        assert report["unchanged"] and report["streak_ended_at"] == 5
    bad, good = ranks[1]["log"], ranks[0]["log"]
    assert "g/5/0" in bad and "not finite" in good


@pytest.mark.full
@pytest.mark.timeout(300)
def test_atomic_checkpoint_a_killed_rank_costs_at_most_the_checkpoint_being_saved(tmp_path: Path) -> None:
    """K-022: of two ranks that save for ever one is killed; the other is ended as a supervisor would do it."""
    model_dir, folder = build_tiny_model(tmp_path / "model", "llama", tied=True), tmp_path / "run"
    folder.mkdir()
    rng = random.Random(0)
    reported = 0
    for victim in (1, 0):
        (folder / "meet").unlink(missing_ok=True)
        ranks = [start_rank("save", rank, 2, model_dir, folder) for rank in range(2)]
        try:
            out = ranks[0].stdout
            assert out is not None
            reported = int(out.readline())
            time.sleep(rng.uniform(0, 0.05))  # a random moment of the saves that follow
            ranks[victim].kill()
            ranks[victim].wait()
        finally:
            for rank in ranks:
                rank.kill()
        rest = ranks[0].communicate()[0].split()
        ranks[1].communicate()
        reported = int(rest[-1]) if rest else reported
        latest = find_latest(folder / "checkpoints")
        assert latest is not None and int(latest.name.removeprefix("step-")) >= reported, victim
    for report in run_ranks(2, "resume", model_dir, folder):
        assert report["version"] == [0, 2]


# What runs in each rank.


def record(index: int) -> Trajectory:
    size = index + 2
    return Trajectory(
        record_id=f"g/{index}/0",
        group_id="g",
        prompt_id="p",
        sample_index=index,
        group_size=NUM_RECORDS,
        attempt=0,
        prompt_token_ids=np.array([1, 2, 3, 4 + index % 2], dtype=np.int32),
        response_token_ids=np.arange(10 + index, 10 + index + size, dtype=np.int32),
        logprobs=np.full(size, -5.0, dtype=np.float32),
        loss_mask=np.ones(size, dtype=np.uint8),
        spans=(VersionSpan(PolicyVersion(0, 0), size),),
        finish_reason=FinishReason.STOP,
        temperature=1.0,
    )


def share(step: int, rank: int, num_ranks: int) -> StepBatch:
    """Two micro-batches a rank; unequal token counts; the last rank of three has padding only in its second."""
    mine = list(range(rank, NUM_RECORDS, num_ranks))
    cut = len(mine) if (num_ranks == 3 and rank == 2) else 1
    records = {index: record(index) for index in mine}
    return StepBatch(
        step=step,
        micro_batches=tuple(
            build_micro_batch([records[i] for i in part], [ADVANTAGES[i] for i in part], step)
            for part in (mine[:cut], mine[cut:])
        ),
        num_loss_tokens=sum(index + 2 for index in range(NUM_RECORDS)),
        num_sequences=NUM_RECORDS,
        num_groups=1,
    )


def poisoned(step: int, rank: int, num_ranks: int) -> StepBatch:
    batch = share(step, rank, num_ranks)
    if rank == 0:
        return batch
    *first, last = batch.micro_batches
    nan = np.where(last.loss_mask != 0, np.float32(np.nan), np.float32(0))
    return msgspec.structs.replace(batch, micro_batches=(*first, msgspec.structs.replace(last, advantages=nan)))


def local_state(trainer: FsdpTrainer) -> list[torch.Tensor]:
    return [tensor.to_local().clone() for tensor in trainer._tensors().values()]  # type: ignore[attr-defined]


def train(trainer: FsdpTrainer, rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    store = CheckpointStore(folder / "checkpoints", keep=2, rank=rank)
    metrics = [trainer.step(share(0, rank, num_ranks)).metrics]
    store.save(trainer, 1)
    metrics.append(trainer.step(share(1, rank, num_ranks)).metrics)
    update = trainer.export_update(None, folder)
    (folder / f"manifest-{rank}.json").write_bytes(msgspec.json.encode(update.manifest))
    return {"metrics": metrics}


def save(trainer: FsdpTrainer, rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    """Save for ever; rank 0 tells each step that is complete."""
    latest = find_latest(folder / "checkpoints")
    step = int(latest.name.removeprefix("step-")) if latest else 0
    trainer.step(share(0, rank, num_ranks))
    store = CheckpointStore(folder / "checkpoints", keep=1, rank=rank)
    while True:
        step += 1
        store.save(trainer, step)
        if rank == 0:
            print(step, flush=True)


def resume(trainer: FsdpTrainer, rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    latest = find_latest(folder / "checkpoints")
    assert latest is not None
    trainer.load(latest)
    result = trainer.step(share(1, rank, num_ranks))
    return {"metrics": [result.metrics], "version": result.version}


def poison(trainer: FsdpTrainer, rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    skipped = [trainer.step(share(0, rank, num_ranks)).skipped]
    before = local_state(trainer)
    skipped.append(trainer.step(poisoned(1, rank, num_ranks)).skipped)
    unchanged = all(torch.equal(old, new) for old, new in zip(before, local_state(trainer), strict=True))
    skipped += [trainer.step(make(step, rank, num_ranks)).skipped for step, make in ((2, share), (3, poisoned))]
    skipped.append(trainer.step(poisoned(4, rank, num_ranks)).skipped)
    try:
        trainer.step(poisoned(5, rank, num_ranks))
    except NonFiniteStreakError:
        return {"skipped": skipped, "unchanged": unchanged, "streak_ended_at": 5}
    raise AssertionError("the streak went on")


def rank_main(scenario: str, rank: int, num_ranks: int, model_dir: Path, folder: Path) -> None:
    learner = LearnerConfig(
        device="cpu",
        threads=1,
        mixed_precision="no",
        learning_rate=1e-3,
        adam_eps=1e-2,
        max_grad_norm=0.5,
        num_ranks=num_ranks,
        max_nonfinite_steps=3,
    )
    config = Config(learner=learner, model=ModelConfig(dtype="float32"))
    trainer = FsdpTrainer.from_config(
        config,
        model_dir,
        algorithm=Grpo(config.algorithm),
        rank=rank,
        num_ranks=num_ranks,
        init_method=f"file://{folder}/meet",
    )
    report = {"train": train, "save": save, "resume": resume, "poison": poison}[scenario](
        trainer, rank, num_ranks, folder
    )
    trainer.close()
    print(json.dumps(report))


if __name__ == "__main__":
    rank_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
