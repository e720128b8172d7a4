"""One vLLM engine for all tests of the run: it takes longer to start than all of them to run."""

import os
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio

from headrace.actors.tiny import build_tiny_model
from headrace.engine.config.schema import Config, ModelConfig, RolloutConfig
from headrace.engine.types import AckStatus, PolicyVersion, TensorSpec, WeightAck, WeightUpdate
from headrace.engine.weights.payload import KeyframeWriter

if TYPE_CHECKING:
    from headrace.actors.rollout.vllm_backend import VllmBackend


class ServedEngine:
    """A running backend, and the means to change what it serves.

    Attributes:
        backend: On a tiny tied Llama in float32, so that log-probabilities can be compared closely.
        folder: For payloads.
        num_updates: Updates tried so far; each gets a version of its own.
    """

    def __init__(self, backend: "VllmBackend", folder: Path) -> None:
        self.backend = backend
        self.folder = folder
        self.num_updates = 0

    def model(self, seed: int) -> Any:
        """A transformers model with the weights of that seed."""
        import torch
        from transformers import AutoModelForCausalLM

        path = self.folder / f"seed-{seed}"
        if not path.exists():
            build_tiny_model(path, tied=True, seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def update(self, seed: int, version: int | None = None) -> WeightUpdate:
        """A keyframe of that seed's weights, under a new version or the given one."""
        self.num_updates = self.num_updates + 1 if version is None else version
        named = [(name, value.detach().numpy()) for name, value in self.model(seed).named_parameters()]
        tensors = [TensorSpec(name=name, dtype="float32", shape=value.shape) for name, value in named]
        path = self.folder / f"payload-{self.num_updates}"
        path.unlink(missing_ok=True)
        with KeyframeWriter(path, tensors, run_id="e2e", version=PolicyVersion(0, self.num_updates)) as writer:
            for index, (_, value) in enumerate(named):
                writer.write(index, 0, np.ascontiguousarray(value))
            return WeightUpdate(manifest=writer.manifest(), local_path=str(path))

    async def serve(self, seed: int) -> WeightAck:
        """Apply that seed's weights and expect success."""
        ack = await self.backend.apply(self.update(seed))
        assert ack.status is AckStatus.SERVING, ack.message
        return ack


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServedEngine]:
    """A started backend; skipped where vLLM is missing, unless HEADRACE_REQUIRE names it."""
    with warnings.catch_warnings():
        # vLLM's imports warn about deprecations of its own.
        warnings.simplefilter("ignore")
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            if "vllm" in os.environ.get("HEADRACE_REQUIRE", "").split(","):
                raise
            pytest.skip(f"vLLM is not installed: {error}")
        from headrace.actors.rollout.vllm_backend import VllmBackend

        folder = tmp_path_factory.mktemp("vllm")
        build_tiny_model(folder / "seed-0", tied=True, seed=0)
        config = Config(
            model=ModelConfig(path=str(folder / "seed-0"), dtype="float32", max_context_tokens=512),
            rollout=RolloutConfig(kv_cache_bytes=64 << 20, max_num_seqs=16, threads=1),
        )
        backend = VllmBackend.from_config(config, folder / "seed-0", version=PolicyVersion(0, 0))
        await backend.start()
    try:
        yield ServedEngine(backend, folder)
    finally:
        await backend.close()
