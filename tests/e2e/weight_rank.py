"""Ranks that publish weights: python weight_rank.py MODEL_DIR FOLDER runs every scenario, one after the other.

Each rank is a forked process and writes, for each version, its part as a keyframe and as the loop would send it, with
their manifests, into FOLDER/SCENARIO. Nothing but imports happens before the forks; the product itself forks nowhere.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from fsdp_rank import share
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaForCausalLM  # noqa: F401  # imported when it is first named

from headrace.actors.learner.algorithms.grpo import Grpo
from headrace.actors.learner.fsdp_trainer import FsdpTrainer
from headrace.actors.learner.sharding import RankGroup
from headrace.actors.learner.weight_export import WeightExporter
from headrace.engine.config.schema import Config, LearnerConfig, ModelConfig
from headrace.engine.interfaces import StagedUpdate
from headrace.engine.types import PolicyVersion

NUM_VERSIONS = 11


def publish(staged: StagedUpdate, rank: int, folder: Path) -> None:
    """Write a version twice, in full and as it is; as the latter it counts as accepted."""
    for name, full in (("full", True), ("sent", False)):
        part = staged.write(folder / name, full=full)
        manifest = folder / name / f"{part.manifest.version.version}-{rank}.json"
        manifest.write_bytes(msgspec.json.encode(part))
    staged.settle(accepted=True)


def train(rank: int, num_ranks: int, model_dir: Path, folder: Path) -> None:
    """Steps of a real model; versions 1 to 11, so ten deltas."""
    learner = LearnerConfig(
        device="cpu", threads=1, mixed_precision="no", learning_rate=2e-5, adam_eps=1e-4, num_ranks=num_ranks
    )
    config = Config(learner=learner, model=ModelConfig(dtype="bfloat16"))
    trainer = FsdpTrainer.from_config(
        config,
        model_dir,
        algorithm=Grpo(config.algorithm),
        rank=rank,
        num_ranks=num_ranks,
        init_method=f"file://{folder}/meet",
    )
    since = None
    for step in range(NUM_VERSIONS):
        trainer.step(share(step, rank, num_ranks))
        publish(trainer.stage_update(since), rank, folder)
        since = PolicyVersion(0, step + 1)
    trainer.close()


def two_cuts(rank: int, num_ranks: int, _: Path, folder: Path) -> None:
    """FSDP over tensor parallelism: strided shards, cut columns, replicated biases and a norm on one mesh dimension."""
    group = make_group(rank, num_ranks, folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make_module()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    follow(model, group, folder)


def replicas(rank: int, num_ranks: int, _: Path, folder: Path) -> None:
    """HSDP: two copies of two shards."""
    group = make_group(rank, num_ranks, folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_module()
    fully_shard(model, mesh=mesh)
    follow(model, group, folder)


def make_group(rank: int, num_ranks: int, folder: Path) -> RankGroup:
    return RankGroup(
        rank=rank, num_ranks=num_ranks, init_method=f"file://{folder}/meet", device=torch.device("cpu"), timeout_s=60
    )


def make_module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 7), torch.nn.LayerNorm(7))


@torch.no_grad()
def follow(model: torch.nn.Module, group: RankGroup, folder: Path) -> None:
    """Move every parameter by a rule of its own value, so that replicas stay equal; save whole ones from torch."""
    config = Config(model=ModelConfig(dtype="bfloat16"))
    parameters = list(model.named_parameters())
    exporter = WeightExporter(parameters, config=config, run_id="run", group=group)
    since = None
    for number in range(1, 4):
        version = PolicyVersion(0, number)
        publish(exporter.stage(version, since), group.rank, folder)
        since = version
        if number == 3:
            break
        for _, parameter in parameters:
            local = parameter.to_local()  # type: ignore[operator]
            local.add_(torch.where(local > 0, local * 0.02, 0.0))
    whole = {name: parameter.full_tensor() for name, parameter in parameters}  # type: ignore[operator]
    if group.rank == 0:
        bits = {name: value.to(torch.bfloat16).view(torch.int16).reshape(-1).tolist() for name, value in whole.items()}
        (folder / "whole.json").write_bytes(msgspec.json.encode(bits))
    group.barrier()
    group.close()


SCENARIOS: Sequence[tuple[str, int, Callable[[int, int, Path, Path], None]]] = (
    ("ranks-1", 1, train),
    ("ranks-2", 2, train),
    ("ranks-4", 4, train),
    ("two-cuts", 4, two_cuts),
    ("replicas", 4, replicas),
)


def main(model_dir: Path, folder: Path) -> int:
    torch.set_num_threads(1)
    for name, num_ranks, scenario in SCENARIOS:
        for kind in ("full", "sent"):
            (folder / name / kind).mkdir(parents=True)
        pids: list[int] = []
        for rank in range(num_ranks):
            pid = os.fork()
            if not pid:
                scenario(rank, num_ranks, model_dir, folder / name)
                sys.exit()
            pids.append(pid)
        if any([os.waitpid(pid, 0)[1] for pid in pids]):
            print(f"{name} failed", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
