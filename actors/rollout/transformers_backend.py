# pyright: basic
# torch and transformers are typed only in part.
"""Generation by transformers, for machines without vLLM: batched, with weight updates in flight.

The event loop never waits for torch: `transformers_loop.py` runs in a thread of its own.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from pathlib import Path

import torch

from headrace.actors.rollout.checkpoint import check_context, check_request
from headrace.actors.rollout.transformers_loop import GenerationLoop, Sample
from headrace.engine.config.schema import Config
from headrace.engine.errors import HeadraceError, RunError, WeightUpdateError
from headrace.engine.types import (
    AckStatus,
    EngineState,
    FinishReason,
    GenerateRequest,
    PauseMode,
    PolicyVersion,
    TokenChunk,
    WeightAck,
    WeightUpdate,
)
from headrace.engine.weights.change_update import refusal_status


class TransformersBackend:
    """An `InferenceBackend` on a transformers model; `rollout.max_num_seqs` samples run at a time.

    Requests that run across an update keep their key-value cache; their later tokens are stamped with the new version.
    """

    def __init__(self, config: Config, model_dir: Path, version: PolicyVersion) -> None:
        self._config = config
        self._model_dir = model_dir
        self._loop = GenerationLoop(config, model_dir, version)
        self._updating = asyncio.Lock()

    @classmethod
    def from_config(cls, config: Config, model_dir: Path, *, version: PolicyVersion) -> "TransformersBackend":
        """Prepare a backend for the checkpoint in `model_dir`, whose weights are those of `version`.

        Raises:
            ConfigError: The folder holds no checkpoint, or the context is longer than the model allows.
        """
        check_context(model_dir, config.model.max_context_tokens)
        return cls(config, model_dir, version)

    async def start(self) -> None:
        """Load the model in the worker thread.

        Raises:
            RunError: It could not be loaded.
        """
        self._loop.start()
        await self._loop.call(self._loop.load_model)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        """Stream one sample. Waits while paused. Closing the iterator or cancelling its reader aborts the request.

        Raises:
            UsageError: The prompt is empty, prompt and `max_tokens` do not fit the context, or stop strings were given
                to a checkpoint without a tokenizer.
            WeightUpdateError: An older version than `min_version` is served, or none after a failed update.
            RunError: The iteration failed (out of memory, ...).
        """
        check_request(request, self._config.model.max_context_tokens, self._model_dir)
        seed = request.sampling.seed
        sample = Sample(
            request=request,
            generator=torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed % (1 << 63)),
            decode=self._loop.decode if request.sampling.stop else None,
            loop=asyncio.get_running_loop(),
            chunks=asyncio.Queue(),
        )
        self._loop.add(sample)
        try:
            while True:
                item = await sample.chunks.get()
                if isinstance(item, HeadraceError):
                    raise item
                yield item
                if item.finish_reason is not FinishReason.NONE:
                    return
        finally:
            sample.cancelled = True

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating after the iteration under way; see `InferenceBackend.pause`. New requests wait."""
        await self._loop.call(lambda: self._loop.pause(mode))

    async def resume(self) -> None:
        """Go on after `pause`. Harmless when not paused."""
        await self._loop.call(self._loop.resume)

    async def apply(self, update: WeightUpdate) -> WeightAck:
        """Serve an update, full or a change file, or say why not; see `InferenceBackend.apply`.

        Generation goes on while the update is verified and prepared, and stands still while it is stored. Cancelling
        the caller does not stop an update that is under way. After FAILED with the digest 0 nothing is served until a
        full update succeeds; after any other refusal the old version is.
        """
        return await asyncio.shield(asyncio.ensure_future(self._apply(update)))

    async def state(self) -> EngineState:
        """What the backend serves and how busy it is."""
        return EngineState(
            model=str(self._model_dir),
            backend="transformers",
            policy_version=self._loop.served.version,
            num_running=self._loop.num_running,
            num_waiting=self._loop.num_waiting,
            max_context_tokens=self._config.model.max_context_tokens,
            num_tokens=self._loop.num_tokens,
        )

    async def close(self) -> None:
        """End the worker thread and every request (finish ABORTED). May be called twice."""
        await asyncio.to_thread(self._loop.close)

    async def _apply(self, update: WeightUpdate) -> WeightAck:
        async with self._updating:
            try:
                staged = await asyncio.to_thread(self._loop.stage, update)
                return await self._loop.call(lambda: self._loop.store(update, staged))
            except WeightUpdateError as error:
                return self._loop.ack(refusal_status(error), str(error))
            except RunError as error:
                return self._loop.ack(AckStatus.FAILED, str(error))
