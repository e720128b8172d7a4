# pyright: basic
# torch and vLLM are typed only in part.
"""How long a delta of 1% takes to reach the parameters of a vLLM that runs in this process, by three ways.

    python benchmarks/weight_scatter.py MODEL_FOLDER [--changed 0.01] [--rounds 7]

`scatter_ms` is the in-place store alone, which is what generation waits for; `stage_ms` runs beside generation.
`nan_path_ms` is vLLM's own sparse path (dense tensors filled with NaN where nothing changes), `reload_ms` its
layer-wise reload of the whole checkpoint. Medians; all three end with the same parameters, which is checked.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.actors.rollout.checkpoint import read_shapes
from headrace.actors.rollout.loader_trace import trace_loader
from headrace.actors.rollout.weight_map import CheckpointTensors, WeightMap, bits, build_weight_map
from headrace.actors.rollout.weight_scatter import WeightScatter
from headrace.engine.weights.changes import WeightChange


def main() -> None:
    """Start vLLM, measure, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    worker = start_vllm(options.folder)
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        figures = measure(worker, options.folder, options.changed, options.rounds)
    print(json.dumps(figures, indent=2))


def start_vllm(folder: Path) -> Any:
    """vLLM's worker, in this process."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_SGL_KERNEL": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    from vllm import LLM

    llm: Any = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=2,
        kv_cache_memory_bytes=32 << 20,
        enforce_eager=True,
        load_format="safetensors",
    )
    worker = llm.llm_engine.model_executor.driver_worker.worker
    worker.keep_alive = llm
    return worker


def measure(worker: Any, folder: Path, share: float, rounds: int) -> dict[str, float]:
    """All figures, in milliseconds."""
    model = worker.model_runner.get_model()
    read = CheckpointTensors(folder)
    names = read_shapes(folder)
    layout = {name: spec for name, spec in read.layout(torch.bfloat16).items() if name in names}
    begun = time.perf_counter()
    trace = trace_loader(model, model.load_weights, layout)
    traced = time.perf_counter()
    found = build_weight_map(model, trace, layout, read)
    verified = time.perf_counter()
    base = {name: read(name).to(torch.bfloat16) for name in layout}
    changes = random_changes(base, share)
    scatter = WeightScatter(found)
    stage_s, scatter_s = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        staged = scatter.stage(changes)
        middle = time.perf_counter()
        scatter.apply(staged)
        end = time.perf_counter()
        stage_s.append(middle - start)
        scatter_s.append(end - middle)
        after = state(found)
        scatter.undo(staged)
    before = state(found)
    new = {name: tensor.clone() for name, tensor in base.items()}
    for change in changes:
        flat = bits(new[change.name]).reshape(-1)
        flat[torch.from_numpy(change.positions)] = torch.from_numpy(change.values.view(np.int16))
    nan_s = timed(lambda: nan_path(model, layout, changes), lambda: reload(worker, base), rounds)
    assert same(found, before)
    nan_path(model, layout, changes)
    assert same(found, after)
    reload_s = timed(lambda: reload(worker, new), lambda: reload(worker, base), rounds)
    reload(worker, new)
    assert same(found, after)
    scatter_ms, nan_ms, reload_ms = (1e3 * statistics.median(values) for values in (scatter_s, nan_s, reload_s))
    return {
        "parameters": float(sum(tensor.numel() for tensor in base.values())),
        "changed": float(sum(len(change.values) for change in changes)),
        "regions": float(sum(len(regions) for regions in found.regions.values())),
        "trace_ms": 1e3 * (traced - begun),
        "verify_ms": 1e3 * (verified - traced),
        "stage_ms": 1e3 * statistics.median(stage_s),
        "scatter_ms": scatter_ms,
        "nan_path_ms": nan_ms,
        "reload_ms": reload_ms,
        "nan_path_over_scatter": nan_ms / scatter_ms,
        "reload_over_scatter": reload_ms / scatter_ms,
    }


def random_changes(base: dict[str, torch.Tensor], share: float) -> list[WeightChange]:
    """The lowest bit of a share of the elements of each tensor, as a step of an optimizer moves them."""
    rng = np.random.default_rng(0)
    changes = []
    for name, tensor in base.items():
        flat = bits(tensor).reshape(-1).numpy().view(np.uint16)
        positions = np.flatnonzero(rng.random(len(flat)) < share).astype(np.int32)
        changes.append(WeightChange(name=name, positions=positions, values=flat[positions] ^ np.uint16(1)))
    return changes


def nan_path(model: Any, layout: Any, changes: list[WeightChange]) -> None:
    """vLLM's own way for a sparse change."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    patches = [
        CheckpointWeightPatch(
            name=change.name,
            shape=layout[change.name][0],
            dtype=torch.bfloat16,
            values=torch.from_numpy(change.values.view(np.int16)).view(torch.bfloat16),
            indices=torch.from_numpy(change.positions),
        )
        for change in changes
    ]
    load_checkpoint_weight_patches(model, patches)


def reload(worker: Any, tensors: dict[str, torch.Tensor]) -> None:
    """vLLM's own way for a whole checkpoint."""
    worker.reload_weights(weights_iterator=iter(tensors.items()), is_checkpoint_format=True, weights_path=None)


def timed(act: Callable[[], None], back: Callable[[], None], rounds: int) -> list[float]:
    """Seconds of each round of `act`; `back` follows each, untimed."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        act()
        taken.append(time.perf_counter() - start)
        back()
    return taken


def state(found: WeightMap) -> list[torch.Tensor]:
    """A copy of all storages."""
    return [storage.flat.clone() for storage in found.storages]


def same(found: WeightMap, saved: list[torch.Tensor]) -> bool:
    """Whether the storages hold those bits."""
    return all(torch.equal(bits(s.flat), bits(v)) for s, v in zip(found.storages, saved, strict=True))


if __name__ == "__main__":
    main()
