# pyright: basic
# vLLM is typed only in part.
"""Generation by vLLM, with weight updates while requests are in flight.

Invariants:
- Requests reach vLLM only while the gate is open, one submission at a time; whoever closes the gate waits for the
  submission under way. So behind a closed gate the set of requests in vLLM is known.
- The version moves only while vLLM is paused, its outputs are drained and every worker has answered that it serves it.
- A prompt's cached prefix is shared only within one version (cache salt). A request without a token at the fence is
  submitted again under the new version; one with tokens keeps its own cache and goes on, its later tokens stamped new.
- A delta that failed and was taken back leaves the old version served. After any other failure half-way nothing is
  served until a full update succeeds.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from headrace.actors.rollout.checkpoint import check_context, check_request, end_token_ids
from headrace.actors.rollout.vllm_engine import (
    build_engine,
    pause_engine,
    prompt_of,
    sampling_params,
    stop_engine,
)
from headrace.actors.rollout.vllm_stream import VllmStream
from headrace.actors.rollout.vllm_updates import WorkerUpdates
from headrace.engine.config.hardware import model_dtype
from headrace.engine.config.schema import Config
from headrace.engine.errors import ActorLostError, RunError, UsageError, WeightUpdateError
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


class VllmBackend:
    """An `InferenceBackend` on vLLM's asynchronous engine.

    At temperature 0 the log-probabilities are those of the distribution at temperature 1.
    """

    def __init__(self, config: Config, model_dir: Path, version: PolicyVersion) -> None:
        self._config = config
        self._model_dir = model_dir
        self._version = version
        self._broken = ""
        self._engine: Any = None
        self._updates: WorkerUpdates | None = None
        self._end_ids = end_token_ids(model_dir)
        self._streams: set[VllmStream] = set()
        self._numbers = itertools.count()
        self._num_tokens = 0
        self._gate = asyncio.Event()
        self._held = False
        self._submitting = asyncio.Lock()
        self._control = asyncio.Lock()
        self._updating = asyncio.Lock()

    @classmethod
    def from_config(cls, config: Config, model_dir: Path, *, version: PolicyVersion) -> "VllmBackend":
        """Prepare a backend for the checkpoint in `model_dir`, whose weights are those of `version`.

        Raises:
            ConfigError: The folder holds no checkpoint, or the context is longer than the model allows.
        """
        check_context(model_dir, config.model.max_context_tokens)
        return cls(config, model_dir, version)

    async def start(self) -> None:
        """Start vLLM, load the model and see whether it takes deltas; other tasks of the loop go on meanwhile.

        Raises:
            RunError: vLLM could not start.
        """
        self._engine = await asyncio.to_thread(build_engine, self._config, self._model_dir)
        self._updates = WorkerUpdates(self._engine, model_dtype(self._config))
        try:
            await self._updates.attach()
        except Exception as error:
            await self.close()
            raise RunError(f"vLLM failed after it had started: {type(error).__name__}: {error}") from error
        self._gate.set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        """Stream one sample. Waits while paused. Closing the iterator or cancelling its reader aborts the request.

        Raises:
            UsageError: The prompt is empty, prompt and `max_tokens` do not fit the context, or stop strings were given
                to a checkpoint without a tokenizer.
            WeightUpdateError: An older version than `min_version` is served, or none after a failed update.
            ActorLostError: vLLM died.
        """
        check_request(request, self._config.model.max_context_tokens, self._model_dir)
        stream = VllmStream(request, self._stamp)
        try:
            await self._admit(stream)
            while True:
                chunk = await stream.next()
                yield chunk
                if chunk.finish_reason is not FinishReason.NONE:
                    return
        finally:
            self._streams.discard(stream)
            stream.detach()
            if not stream.ended and stream.engine_id and self._engine is not None:
                await self._engine.abort(stream.engine_id)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; see `InferenceBackend.pause`. New requests wait for `resume`.

        Raises:
            ActorLostError: vLLM died.
        """
        async with self._control:
            await self._stop_generating(mode)
            self._held = True

    async def resume(self) -> None:
        """Go on after `pause`. Harmless when not paused.

        Raises:
            ActorLostError: vLLM died.
        """
        async with self._control:
            if self._held:
                self._held = False
                await self._go_on()

    async def apply(self, update: WeightUpdate) -> WeightAck:
        """Serve an update, full or a change file, or say why not; see `InferenceBackend.apply`.

        Generation goes on while the update is verified and prepared, and stands still while it is stored. Cancelling
        the caller does not stop an update that is under way. After FAILED with the digest 0 nothing is served until a
        full update succeeds; after any other refusal the old version is.
        """
        return await asyncio.shield(asyncio.ensure_future(self._apply(update)))

    async def state(self) -> EngineState:
        """What the backend serves and how busy it is."""
        running = sum(1 for stream in self._streams if stream.num_tokens)
        return EngineState(
            model=str(self._model_dir),
            backend="vllm",
            policy_version=self._version,
            num_running=running,
            num_waiting=len(self._streams) - running,
            max_context_tokens=self._config.model.max_context_tokens,
            num_tokens=self._num_tokens,
        )

    async def close(self) -> None:
        """End vLLM's processes and every request (finish ABORTED); returns when they are gone. May be called twice."""
        engine, self._engine = self._engine, None
        for stream in list(self._streams):
            stream.abort()
            stream.detach()
        self._broken = "The backend was closed."
        self._gate.set()
        if engine is not None:
            await stop_engine(engine)

    def _stamp(self, num_tokens: int) -> PolicyVersion:
        self._num_tokens += num_tokens
        return self._version

    async def _admit(self, stream: VllmStream) -> None:
        while True:
            await self._gate.wait()
            async with self._submitting:
                # The gate may have closed while this request waited for its turn.
                if self._gate.is_set():
                    if self._broken:
                        raise WeightUpdateError(self._broken)
                    if self._version < stream.request.min_version:
                        raise WeightUpdateError(
                            f"Request {stream.request.request_id} needs version {stream.request.min_version}; "
                            f"this backend serves {self._version}."
                        )
                    self._streams.add(stream)
                    await self._submit(stream)
                    return

    async def _submit(self, stream: VllmStream) -> None:
        engine_id = f"headrace-{next(self._numbers)}"
        stream.engine_id = engine_id
        try:
            collector = await self._engine.add_request(
                engine_id,
                prompt_of(stream.request.token_ids, f"{self._version.incarnation}:{self._version.version}"),
                sampling_params(stream.request.sampling, self._end_ids),
            )
        except ValueError as error:
            raise UsageError(f"vLLM refuses request {stream.request.request_id}: {error}") from error
        except Exception as error:
            raise ActorLostError(f"vLLM takes no requests: {type(error).__name__}: {error}") from error
        stream.attach(engine_id, collector)

    async def _stop_generating(self, mode: PauseMode) -> None:
        """Close the gate and pause vLLM; afterwards all tokens so far are in the streams, stamped."""
        self._gate.clear()
        async with self._submitting:
            pass
        try:
            await pause_engine(self._engine, mode)
        except Exception as error:
            raise ActorLostError(f"vLLM could not be paused: {error}") from error
        for stream in list(self._streams):
            stream.drain()
        if mode is PauseMode.ABORT:
            await self._abort_all()

    async def _abort_all(self) -> None:
        for stream in list(self._streams):
            if not stream.ended:
                stream.abort()
                await self._engine.abort(stream.engine_id)

    async def _go_on(self) -> None:
        try:
            await self._engine.resume_generation()
        except Exception as error:
            raise ActorLostError(f"vLLM could not be resumed: {error}") from error
        self._gate.set()

    async def _apply(self, update: WeightUpdate) -> WeightAck:
        async with self._updating:
            if self._engine is None or self._updates is None:
                return self._ack(AckStatus.FAILED, "The backend is not running.")
            try:
                refused = await self._updates.prepare(update, self._version)
                if refused is not None:
                    return self._ack(*refused)
                async with self._control:
                    return await self._load(update)
            except Exception as error:
                # An engine that died: its streams end by themselves, and whoever waits at the gate is told.
                self._broken = self._broken or f"vLLM failed during an update: {error}"
                self._updates.forget()
                self._gate.set()
                return self._ack(AckStatus.FAILED, self._broken)

    async def _load(self, update: WeightUpdate) -> WeightAck:
        """Have the workers store what they prepared, in a pause."""
        assert self._updates is not None
        started = time.monotonic()
        if not self._held:
            await self._stop_generating(PauseMode.KEEP)
        loading = time.monotonic()
        failed = await self._updates.store(update)
        apply_s = time.monotonic() - loading
        if failed is None:
            self._version, self._broken = update.manifest.version, ""
            await self._resubmit_untouched()
        elif self._updates.digest == 0:
            self._broken = f"Nothing is served after a failed update, until a full update succeeds: {failed[1]}"
            failed = (AckStatus.FAILED, self._broken)
            await self._abort_all()
        if not self._held:
            await self._go_on()
        pause_s = time.monotonic() - started
        return self._ack(*(failed or (AckStatus.SERVING, "")), pause_s, apply_s)

    async def _resubmit_untouched(self) -> None:
        """Requests without a token start again, so that nothing of theirs was computed under the old version."""
        for stream in list(self._streams):
            if not stream.ended and stream.num_tokens == 0:
                old = stream.engine_id
                stream.detach()
                await self._engine.abort(old)
                await self._submit(stream)

    def _ack(self, status: AckStatus, message: str, pause_s: float = 0.0, apply_s: float = 0.0) -> WeightAck:
        return WeightAck(
            version=self._version,
            status=status,
            digest=0 if self._updates is None else self._updates.digest,
            message=message,
            pause_s=pause_s,
            apply_s=apply_s,
        )
