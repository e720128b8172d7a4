# pyright: basic
# torch and vLLM are typed only in part.
"""Weight deltas inside a real vLLM: its parameters are, bit for bit, those of an engine that loaded the checkpoint."""

import gc
import importlib
import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.engine.types import AckStatus, PauseMode, PolicyVersion, TensorSpec, WeightUpdate
from headrace.engine.weights.changes import WeightChange, write_changes
from headrace.engine.weights.payload import KeyframeWriter

pytestmark = [
    pytest.mark.needs("vllm"),
    pytest.mark.timeout(300),
    # Of vLLM itself and of the libraries that it imports.
    pytest.mark.filterwarnings("default"),
]

Tensors = dict[str, np.ndarray]
SERVING = int(AckStatus.SERVING)


def changed(tensors: Tensors, rng: np.random.Generator, share: float = 0.02) -> tuple[Tensors, list[WeightChange]]:
    """New tensors (as bits), and the change that leads to them: positions for most, a whole dense range for one."""
    new, changes = {}, []
    dense = rng.choice(sorted(tensors))
    for name, old in tensors.items():
        flat = old.reshape(-1).copy()
        count = len(flat) if name == dense else max(1, int(len(flat) * share))
        positions = np.sort(rng.choice(len(flat), count, replace=False)).astype(np.int32)
        # Another sign, and the lowest bits as a small step would move them.
        flat[positions] ^= flat.dtype.type((1 << (8 * flat.itemsize - 1)) | int(rng.integers(1, 8)))
        new[name] = flat.reshape(old.shape)
        if name == dense:
            changes.append(WeightChange(name=name, values=flat))
        else:
            changes.append(WeightChange(name=name, positions=positions, values=flat[positions]))
    return new, changes


async def rpc(backend: Any, method: str, *args: Any) -> Any:
    return (await backend._engine.collective_rpc(method, args=args))[0]


@pytest.mark.asyncio(loop_scope="session")
async def test_three_deltas_and_a_revert_are_bit_for_bit_what_a_full_update_loads(
    vllm_engine: Any, tmp_path: Path
) -> None:
    backend = vllm_engine.backend
    await vllm_engine.serve(0)
    model = vllm_engine.model(0)
    tensors = {name: value.detach().numpy().view(np.uint32) for name, value in model.named_parameters()}
    status, message, _ = await rpc(backend, "headrace_attach", str(vllm_engine.folder / "seed-0"))
    assert (status, "0 by reload" in message) == (SERVING, True), message
    states, digests = [tensors], [await rpc(backend, "headrace_digest")]
    rng = np.random.default_rng(1)
    for number in range(1, 4):
        tensors, changes = changed(tensors, rng)
        file = write_changes(tmp_path / f"delta-{number}", changes, digest=number)
        assert (await rpc(backend, "headrace_stage", msgspec.msgpack.encode(file)))[0] == SERVING
        assert (await rpc(backend, "headrace_staged"))[:2] == [SERVING, ""]
        assert await rpc(backend, "headrace_digest") == digests[-1]
        await backend.pause(PauseMode.KEEP)
        assert await rpc(backend, "headrace_apply") == [SERVING, "", number]
        await backend.resume()
        states.append(tensors)
        digests.append(await rpc(backend, "headrace_digest"))
    assert len(set(digests)) == 4
    assert await rpc(backend, "headrace_revert") == [SERVING, "", 2]
    assert await rpc(backend, "headrace_digest") == digests[2]
    for number in (3, 2):
        ack = await backend.apply(keyframe(vllm_engine, states[number], tmp_path / f"full-{number}"))
        assert ack.status is AckStatus.SERVING, ack.message
        assert await rpc(backend, "headrace_digest") == digests[number]
    # A worker answers, and never raises, whatever it is told.
    assert (await rpc(backend, "headrace_apply"))[0] == AckStatus.FAILED
    assert (await rpc(backend, "headrace_stage", b"nonsense"))[0] == SERVING
    assert (await rpc(backend, "headrace_staged"))[0] == AckStatus.CORRUPT
    assert await rpc(backend, "headrace_digest") == digests[2]


def keyframe(vllm_engine: Any, tensors: Tensors, path: Path) -> WeightUpdate:
    vllm_engine.num_updates += 1
    specs = [TensorSpec(name=name, dtype="float32", shape=value.shape) for name, value in tensors.items()]
    version = PolicyVersion(0, vllm_engine.num_updates)
    with KeyframeWriter(path, specs, run_id="e2e", version=version) as writer:
        for index, value in enumerate(tensors.values()):
            writer.write(index, 0, value.view(np.float32))
        return WeightUpdate(manifest=writer.manifest(), local_path=str(path))


# Odd sizes on purpose: a vocabulary that is padded, and key heads that two ranks share.
_SIZES = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}


_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_key_value_heads": 2, "head_dim": 32, "num_experts": 4, "moe_intermediate_size": 64},
    ),
}


def build_model(folder: Path, kind: str) -> Path:
    """A random bfloat16 checkpoint in which no tensor is constant."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    name, own = _KINDS[kind]
    config = getattr(transformers, name)(**_SIZES, **own)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def read_bits(folder: Path) -> Tensors:
    import torch
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    return {name: value.view(torch.int16).numpy().view(np.uint16) for name, value in tensors.items()}


def export(base: Path, folder: Path, tensors: Tensors) -> Path:
    """The checkpoint `base` with other tensors."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    values = {n: torch.from_numpy(v.view(np.int16)).view(torch.bfloat16).contiguous() for n, v in tensors.items()}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@contextmanager
def engine(folder: Path, ranks: int = 1, *, dtype: str = "bfloat16", packed: bool = False) -> Generator[Any]:
    """vLLM's blocking engine on a checkpoint, all gone afterwards; one rank runs in this process, two in their own."""
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if ranks > 1 else "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if ranks == 2 else "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_SGL_KERNEL": "0",
        "TORCHDYNAMO_DISABLE": "1",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm._custom_ops
        from vllm import LLM
        from vllm.config import WeightTransferConfig
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
        from vllm.plugins import load_general_plugins

        from headrace.actors.rollout.vllm_plugin import ENGINE_NAME, register

        load_general_plugins()
        register()
        # As where the plugin is missing: vLLM loads its plugins once in a process, so nothing turns it off again.
        vllm._custom_ops._supports_onednn = packed
        llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp" if ranks > 1 else "uni",
            dtype=dtype,
            max_model_len=128,
            max_num_seqs=4,
            kv_cache_memory_bytes=32 << 20,
            block_size=32,
            enforce_eager=True,
            enable_prefix_caching=False,
            load_format="safetensors",
            weight_transfer_config=WeightTransferConfig(backend=ENGINE_NAME),
            worker_extension_cls="headrace.actors.rollout.vllm_weights.WeightReceiver",
            disable_log_stats=True,
        )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        vllm._custom_ops._supports_onednn = False
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def said(llm: Any) -> Any:
    """Tokens and log-probabilities of one greedy answer."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": list(range(5, 25))}], sampling, use_tqdm=False)
    answer = output.outputs[0]
    return [(t, entry[t].logprob) for t, entry in zip(answer.token_ids, answer.logprobs, strict=True)]


def every(llm: Any, method: str, *args: Any) -> list[Any]:
    return llm.collective_rpc(method, args=args)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3"])
def test_fifty_deltas_give_the_engine_that_a_fresh_start_on_the_export_gives(
    tmp_path: Path, kind: str, ranks: int
) -> None:
    base = build_model(tmp_path / "base", kind)
    tensors = read_bits(base)
    rng = np.random.default_rng(0)
    with engine(base, ranks) as llm:
        for status, message, _ in every(llm, "headrace_attach"):
            assert status == SERVING, message
            assert " 0 by reload" in message, message
        for number in range(1, 51):
            new, changes = changed(tensors, rng)
            file = write_changes(tmp_path / "delta", changes, digest=number)
            every(llm, "headrace_stage", msgspec.msgpack.encode(file))
            before = every(llm, "headrace_digest") if number % 10 == 0 else None
            assert every(llm, "headrace_staged") == [[SERVING, "", number - 1]] * ranks
            assert every(llm, "headrace_apply") == [[SERVING, "", number]] * ranks
            if before is not None:
                assert every(llm, "headrace_revert") == [[SERVING, "", number - 1]] * ranks
                assert every(llm, "headrace_digest") == before
                every(llm, "headrace_stage", msgspec.msgpack.encode(file))
                assert every(llm, "headrace_apply") == [[SERVING, "", number]] * ranks
            tensors = new
        served, answer = every(llm, "headrace_digest"), said(llm)
    with engine(export(base, tmp_path / "export", tensors), ranks) as llm:
        assert every(llm, "headrace_digest") == served
        assert said(llm) == answer


@pytest.mark.full
def test_weights_that_the_kernels_packed_are_refused_before_anything_is_staged(tmp_path: Path) -> None:
    # In float32, because oneDNN packs that on every processor.
    with engine(build_model(tmp_path / "base", "qwen3"), dtype="float32", packed=True) as llm:
        before = said(llm)
        ((status, message, _),) = every(llm, "headrace_attach")
        assert status == AckStatus.UNKNOWN_LAYOUT
        assert "computes with a packed or derived copy" in message
        ((status, message, _),) = every(llm, "headrace_stage", b"")
        assert (status, "was not attached" in message) == (AckStatus.UNKNOWN_LAYOUT, True)
        assert said(llm) == before


@pytest.mark.full
def test_experts_go_by_reload_or_are_refused_and_are_never_half_applied(tmp_path: Path) -> None:
    base = build_model(tmp_path / "base", "qwen3_moe")
    tensors = read_bits(base)
    with engine(base) as llm:
        before, answer = every(llm, "headrace_digest"), said(llm)
        ((status, message, _),) = every(llm, "headrace_attach")
        assert every(llm, "headrace_digest") == before
        assert said(llm) == answer
        if status != SERVING:
            assert "cannot take new weights" in message
            return
        tensors, changes = changed(tensors, np.random.default_rng(0))
        file = write_changes(tmp_path / "delta", changes, digest=1)
        every(llm, "headrace_stage", msgspec.msgpack.encode(file))
        assert every(llm, "headrace_apply") == [[SERVING, "", 1]]
        served, answer = every(llm, "headrace_digest"), said(llm)
    with engine(export(base, tmp_path / "export", tensors)) as llm:
        assert every(llm, "headrace_digest") == served
        assert said(llm) == answer
