# pyright: basic
# vLLM is typed only in part.
"""Starting vLLM, and everything that may differ between its versions (0.25 and 0.32 are used)."""

import asyncio
import contextlib
import os
import secrets
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.actors.rollout.checkpoint import has_tokenizer
from headrace.actors.rollout.vllm_plugin import ENGINE_NAME, register
from headrace.engine.config.hardware import model_dtype
from headrace.engine.config.schema import Config
from headrace.engine.errors import RunError
from headrace.engine.types import FinishReason, PauseMode, SamplingParams, WeightUpdate

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
else:
    AsyncLLM = Any

_FINISH_REASONS = {
    None: FinishReason.NONE,
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORTED,
}


# Only on CPU. The first gain nothing but 20 s of compiling at the first log-probability; the others would pack weights,
# and a kernel that packed them keeps computing with the old ones after an update.
_CPU_VARIABLES = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_SGL_KERNEL": "0", "VLLM_ZENTORCH_WEIGHT_PREPACK": "0"}

# Prefixes are cached in whole blocks: with the default of 128 tokens a short prompt would be computed for each sample.
_CPU_BLOCK_TOKENS = 32


def build_engine(config: Config, model_dir: Path) -> AsyncLLM:
    """Start vLLM's processes and load the model. Blocks for seconds to minutes; call it in a thread.

    Raises:
        RunError: vLLM could not start; the cause is chained.
    """
    with _child_environment(config):
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        register()
        on_cpu = current_platform.is_cpu()
        if on_cpu:
            os.environ.update(_CPU_VARIABLES)
        memory: dict[str, Any] = (
            {"kv_cache_memory_bytes": config.rollout.kv_cache_bytes, "block_size": _CPU_BLOCK_TOKENS}
            if on_cpu
            else {"gpu_memory_utilization": config.rollout.gpu_memory_utilization}
        )
        arguments = AsyncEngineArgs(
            model=str(model_dir),
            # Without a tokenizer vLLM still takes and gives ids; only stop strings need text.
            skip_tokenizer_init=not has_tokenizer(model_dir),
            dtype=model_dtype(config),
            max_model_len=config.model.max_context_tokens,
            max_num_seqs=config.rollout.max_num_seqs,
            enable_prefix_caching=True,
            # Of the distribution that a token was drawn from: after temperature, top-k and top-p.
            logprobs_mode="processed_logprobs",
            # Compiling costs more on a CPU than it gives back in a run of minutes.
            enforce_eager=on_cpu,
            # Two engines that sample one group must not draw the same numbers.
            seed=secrets.randbelow(1 << 31),
            load_format="safetensors",
            weight_transfer_config=WeightTransferConfig(backend=ENGINE_NAME),
            worker_extension_cls="headrace.actors.rollout.vllm_weights.WeightReceiver",
            disable_log_stats=True,
            **memory,
        )
        try:
            return AsyncLLM.from_engine_args(arguments)
        except Exception as error:
            raise RunError(f"vLLM could not start with {model_dir}: {type(error).__name__}: {error}") from error


def sampling_params(sampling: SamplingParams, end_ids: frozenset[int]) -> Any:
    """vLLM's parameters for one sample: ids and log-probabilities of the drawn tokens, streamed as they come."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VllmSamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=sorted({*sampling.stop_token_ids, *end_ids}),
        seed=None if sampling.seed is None else sampling.seed % (1 << 63),
        logprobs=0,
        detokenize=bool(sampling.stop),
        include_stop_str_in_output=bool(sampling.stop),
        output_kind=RequestOutputKind.DELTA,
    )


def prompt_of(token_ids: tuple[int, ...], salt: str) -> Any:
    """A prompt whose cached prefixes are shared only with prompts of the same salt."""
    return {"prompt_token_ids": list(token_ids), "cache_salt": salt}


def encode_update(update: WeightUpdate) -> bytes:
    """The control message: manifest and path, not the payload."""
    return msgspec.msgpack.encode(update)


def decode_update(message: bytes) -> WeightUpdate:
    """Inverse of `encode_update`; refuses anything of another shape (msgspec.ValidationError)."""
    return msgspec.msgpack.decode(message, type=WeightUpdate)


def read_output(output: Any) -> tuple[tuple[int, ...], tuple[float, ...], FinishReason]:
    """Ids, log-probabilities and the reason, if any, of one streamed output.

    Raises:
        RunError: The request failed inside vLLM.
    """
    completion = output.outputs[0]
    if completion.finish_reason not in _FINISH_REASONS:
        raise RunError(f"vLLM ended request {output.request_id} with {completion.finish_reason!r}.")
    token_ids = tuple(completion.token_ids)
    entries = completion.logprobs or ()
    logprobs = tuple(float(entry[token].logprob) for token, entry in zip(token_ids, entries, strict=True))
    return token_ids, logprobs, _FINISH_REASONS[completion.finish_reason]


async def pause_engine(engine: AsyncLLM, mode: PauseMode) -> None:
    """Pause, and return once all that was produced until then lies in the requests' collectors.

    The cache stays: salts keep versions apart, and kept requests go on with their own. vLLM's front end would wait a
    fixed 20 ms for outputs to settle, so the engine core is asked directly and they are waited for.
    """
    await engine.engine_core.pause_scheduler_async(
        mode="keep" if mode is PauseMode.KEEP else "abort", clear_cache=False
    )
    await _settle_outputs(engine)


async def _settle_outputs(engine: AsyncLLM) -> None:
    """Return once every output that a paused engine had produced lies in its request's collector.

    The engine core sends its last outputs before it answers the pause, over the same socket, so they are in the front
    end's queue by now; what is left is to let the front end's handler empty it. The handler waits for the queue only
    when it is done with everything before, which is what is looked for here.
    """
    queue = engine.engine_core.outputs_queue
    while engine.output_handler is not None and not engine.output_handler.done():
        if queue.empty() and getattr(queue, "_getters", True):
            return
        await asyncio.sleep(0)


async def stop_engine(engine: AsyncLLM) -> None:
    """End vLLM's processes; returns when they are gone. Idempotent."""
    handler = engine.output_handler
    await asyncio.to_thread(engine.shutdown)
    # Its finaliser calls this again, perhaps when the interpreter has already taken its modules apart.
    engine.shutdown = lambda timeout=None: None  # type: ignore[method-assign]
    if handler is not None:
        handler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await handler


@contextlib.contextmanager
def _child_environment(config: Config) -> Generator[None]:
    """Variables for vLLM's child processes, gone again from ours when they have started."""
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # A forked child with a used gRPC channel hangs.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.rollout.threads),
    }
    if "VLLM_PLUGINS" in os.environ:
        wanted["VLLM_PLUGINS"] = f"{os.environ['VLLM_PLUGINS']},{ENGINE_NAME}"
    before = {name: os.environ.get(name) for name in (*wanted, *_CPU_VARIABLES)}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
