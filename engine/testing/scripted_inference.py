"""An inference backend without a model: for tests, benchmarks and the simulator.

Invariants:

- A token is stamped with the version that is served in the very moment it is produced; nothing is produced while the
  backend is paused or applies an update.
- Each request that was accepted ends in exactly one way: with a last chunk, or by the caller's own close.
- At most `max_running` requests hold a slot; the others wait in the order they came.
- An update is served wholly or not at all: the version changes in one step, after everything that can fail.
"""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import numpy as np

from headrace.engine.clock import Clock, SystemClock
from headrace.engine.errors import (
    ActorLostError,
    InputError,
    UnknownLayoutError,
    UsageError,
    WeightUpdateError,
)
from headrace.engine.testing.request_slots import RequestSlots, RequestState
from headrace.engine.testing.scripts import FixedLength, Script, constant_script, random_script
from headrace.engine.types import (
    AckStatus,
    EngineState,
    FinishReason,
    GenerateRequest,
    PauseMode,
    PolicyVersion,
    TokenChunk,
    UpdateKind,
    WeightAck,
    WeightUpdate,
)
from headrace.engine.weights.change_update import ServedState, open_change_update, refusal_status
from headrace.engine.weights.changes import check_change
from headrace.engine.weights.layout import num_elements
from headrace.engine.weights.payload import verify_payload

Sleep = Callable[[float], Awaitable[None]]
_FIRST_VERSION = PolicyVersion(0, 0)


class ScriptedInferenceBackend:
    """Says what a script tells it to, at a given speed, with real pause, abort and update semantics.

    Equal seeds give equal tokens and log-probabilities for equal requests, whatever the order they come in. Tokens are
    produced as the caller reads; a caller that does not read holds its slot.
    """

    def __init__(
        self,
        script: Script | Sequence[int] | None = None,
        *,
        seed: int = 0,
        tokens_per_s: float = 0.0,
        tokens_per_chunk: int = 1,
        max_running: int = 64,
        max_context_tokens: int = 4096,
        version: PolicyVersion = _FIRST_VERSION,
        apply_s: float = 0.0,
        clock: Clock | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """Prepare a backend.

        Args:
            script: The response to each request, or a function that gives it; None: 16 random tokens.
            seed: Of the script's generator, together with the request's id and seed.
            tokens_per_s: Speed of one request; 0 is as fast as the caller reads.
            tokens_per_chunk: Tokens of each chunk but the last.
            max_running: Requests that generate at the same time.
            max_context_tokens: Prompt and `max_tokens` together may not exceed it.
            version: Served from the start.
            apply_s: How long an update takes, generation standing still.
            clock: Times the pause of an update; give a `FakeClock` together with its `sleep`.
            sleep: Waits for the script's speed; a fake makes tests instant.
        """
        if script is None:
            script = random_script(FixedLength(num_tokens=16))
        self._script: Script = script if callable(script) else constant_script(script)
        self._seed = seed
        self._chunk_s = tokens_per_chunk / tokens_per_s if tokens_per_s else 0.0
        self._tokens_per_chunk = tokens_per_chunk
        self._max_context_tokens = max_context_tokens
        self._served = ServedState(version=version)
        self._apply_s = apply_s
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._slots = RequestSlots(max_running)
        self._applying = asyncio.Lock()
        self._num_tokens = 0
        self._paused = False
        self._started = False
        self._closed = False
        self._apply_failure: str | None = None

    def fail_next_apply(self, reason: str) -> None:
        """Make the next `apply` fail with `reason` after its pause, as an engine that cannot write its weights."""
        self._apply_failure = reason

    async def start(self) -> None:
        """Ready at once.

        Raises:
            UsageError: It was started before.
        """
        if self._started:
            raise UsageError("a scripted backend was started twice; start it once")
        self._started = True

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the script's response; waits for a slot, for `resume`, and for the script's speed.

        Closing the generator or cancelling its reader frees the slot at once.

        Raises:
            WeightUpdateError: An older version than `request.min_version` is served.
            InputError: The prompt and `max_tokens` do not fit the context.
            ActorLostError: The backend has been closed.
            UsageError: It has not been started.
        """
        self._check(request)
        key = zlib.crc32(request.request_id.encode())
        rng = np.random.default_rng([self._seed, key, request.sampling.seed or 0])
        tokens, last = _cut(self._script(request, rng), request)
        logprobs = [-float(value) for value in rng.random(len(tokens), np.float32)]
        with self._slots.enter() as state:
            async with self._slots.slot(state, self._stands_still):
                for start in range(0, len(tokens), self._tokens_per_chunk):
                    await self._pace(state)
                    if state.aborted:
                        break
                    end = min(start + self._tokens_per_chunk, len(tokens))
                    self._num_tokens += end - start
                    reason = last if end == len(tokens) else FinishReason.NONE
                    yield self._chunk(tokens[start:end], logprobs[start:end], reason)
                    if reason is not FinishReason.NONE:
                        return
            yield self._chunk([], [], FinishReason.ABORTED if state.aborted else last)

    async def pause(self, mode: PauseMode) -> None:
        """Stop producing at once; with ABORT every request ends, also those that wait for a slot."""
        self._paused = True
        if mode is PauseMode.ABORT:
            self._slots.abort_all()

    async def resume(self) -> None:
        """Go on."""
        self._paused = False
        self._slots.wake_all()

    async def apply(self, update: WeightUpdate) -> WeightAck:
        """Serve the update's version, or say why not. Updates are applied one after the other.

        The payload of a keyframe is verified where the update names a file (this blocks the loop for its reading); a
        keyframe without a path is believed. Deltas come as change files. Cancelling while the update is applied leaves
        the old version.
        """
        async with self._applying:
            begin = self._clock.monotonic()
            try:
                self._refuse(update)
                await self._sleep(self._apply_s)
                failure, self._apply_failure = self._apply_failure, None
                if failure is not None:
                    raise WeightUpdateError(failure)
            except WeightUpdateError as error:
                status, message = refusal_status(error), str(error)
            except ActorLostError as error:
                status, message = AckStatus.FAILED, str(error)
            else:
                status, message = AckStatus.SERVING, ""
                manifest = update.manifest
                self._served = ServedState(
                    version=manifest.version, digest=manifest.digest, layout_hash=manifest.layout_hash
                )
            took_s = self._clock.monotonic() - begin
        self._slots.wake_all()
        return WeightAck(
            version=self._served.version,
            status=status,
            digest=self._served.digest,
            message=message,
            pause_s=took_s,
            apply_s=took_s,
        )

    async def state(self) -> EngineState:
        """The state right now."""
        return EngineState(
            model="scripted",
            backend="scripted",
            policy_version=self._served.version,
            num_running=self._slots.num_running,
            num_waiting=self._slots.num_waiting,
            max_context_tokens=self._max_context_tokens,
            num_tokens=self._num_tokens,
        )

    async def close(self) -> None:
        """End every request as aborted and refuse new ones. May be called twice."""
        self._closed = True
        self._slots.abort_all()

    def _check(self, request: GenerateRequest) -> None:
        if self._closed:
            raise ActorLostError("the scripted backend has been closed")
        if not self._started:
            raise UsageError("the scripted backend has not been started; await start() first")
        if self._served.version < request.min_version:
            raise WeightUpdateError(f"version {request.min_version} was asked for; {self._served.version} is served")
        num_tokens = len(request.token_ids) + request.sampling.max_tokens
        if num_tokens > self._max_context_tokens:
            raise InputError(
                f"prompt and max_tokens take {num_tokens} tokens; the context has {self._max_context_tokens}; "
                "shorten the prompt or lower max_tokens"
            )

    def _refuse(self, update: WeightUpdate) -> None:
        manifest = update.manifest
        if self._closed:
            raise ActorLostError("the scripted backend has been closed")
        if manifest.kind is UpdateKind.DELTA:
            sizes = {spec.name: num_elements(spec) for spec in manifest.tensors}
            for change in open_change_update(update, self._served):
                check_change(change, sizes.get(change.name, 0))
            return
        if self._served.layout_hash and manifest.layout_hash != self._served.layout_hash:
            raise UnknownLayoutError("the update's layout is not that of the weights that are served")
        if update.local_path:
            verify_payload(update)

    def _stands_still(self) -> bool:
        return self._paused or self._applying.locked()

    async def _pace(self, state: RequestState) -> None:
        """Wait as long as the next chunk takes, and while the backend stands still; an abort ends both."""
        if state.aborted:
            return
        if self._chunk_s > 0:
            await state.sleep(self._sleep(self._chunk_s))
        else:
            await self._sleep(0)
        await state.wait_until(lambda: not self._stands_still())

    def _chunk(self, tokens: Sequence[int], logprobs: Sequence[float], reason: FinishReason) -> TokenChunk:
        return TokenChunk(
            token_ids=tuple(tokens), logprobs=tuple(logprobs), policy_version=self._served.version, finish_reason=reason
        )


def _cut(script: Sequence[int], request: GenerateRequest) -> tuple[list[int], FinishReason]:
    """The part of a script that a request gets: up to its first stop token, and at most `max_tokens`."""
    tokens = list(script)
    for position, token in enumerate(tokens):
        if token in request.sampling.stop_token_ids:
            tokens = tokens[: position + 1]
            break
    limit = request.sampling.max_tokens
    return (tokens[:limit], FinishReason.LENGTH) if len(tokens) > limit else (tokens, FinishReason.STOP)
