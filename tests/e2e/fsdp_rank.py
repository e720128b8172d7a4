"""The ranks of the FSDP tests: python fsdp_rank.py SCENARIO RANK NUM_RANKS MODEL_DIR FOLDER, for one of them.

Without arguments it reads "SCENARIO NUM_RANKS MODEL_DIR FOLDER" in lines, forks a process for each rank, and says in a
line how they ended. Each rank writes its report and its log into the folder.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from headrace.actors.learner.algorithms.grpo import Grpo
from headrace.actors.learner.checkpoint import CheckpointStore, find_latest
from headrace.actors.learner.fsdp_trainer import FsdpTrainer
from headrace.actors.learner.packing import build_micro_batch
from headrace.engine.config.schema import Config, LearnerConfig, ModelConfig
from headrace.engine.errors import NonFiniteStreakError
from headrace.engine.types import (
    FinishReason,
    PolicyVersion,
    StepBatch,
    Trajectory,
    VersionSpan,
)

NUM_RECORDS = 6
ADVANTAGES = [1.0, -0.5, 0.25, -0.75, 2.0, 0.125]


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
    others = folder / "others"
    return {"metrics": metrics, "resumed": go_on(trainer, rank, num_ranks, others) if others.exists() else None}


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
    return go_on(trainer, rank, num_ranks, folder / "checkpoints")


def go_on(trainer: FsdpTrainer, rank: int, num_ranks: int, checkpoints: Path) -> dict[str, Any]:
    latest = find_latest(checkpoints)
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


def all_ranks(scenario: str, num_ranks: int, model_dir: Path, folder: Path) -> int:
    """Fork a process for each rank, and end them all when one fails; returns 1 then."""
    pids: set[int] = set()
    for rank in range(num_ranks):
        pid = os.fork()
        if not pid:
            log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, sys.stderr.fileno())
            rank_main(scenario, rank, num_ranks, model_dir, folder)
            sys.exit()
        pids.add(pid)
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if status:
            for other in pids:  # they would wait for it in a collective
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


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
    (folder / f"report-{rank}").write_text(json.dumps(report))


def serve() -> None:
    """Nothing but imports happens in this process, once for all ranks; the product itself forks nowhere."""
    from transformers import LlamaForCausalLM  # noqa: F401  # imported when it is first named

    for line in sys.stdin:
        scenario, num_ranks, *paths = line.split()
        print(all_ranks(scenario, int(num_ranks), *map(Path, paths)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        rank_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
    else:
        serve()
