# pyright: basic
# vLLM is typed only in part.
"""One running sample of `VllmBackend`: from vLLM's collector to the caller's iterator.

Invariants:
- Every chunk is stamped when it leaves vLLM's collector, not when the caller reads it; collectors are emptied at the
  fence of a weight update before the version moves, so no chunk holds tokens of two versions.
- A stream ends exactly once: with a finish reason, or with an error.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from headrace.actors.rollout.vllm_engine import read_output
from headrace.engine.errors import ActorLostError, RunError
from headrace.engine.types import FinishReason, GenerateRequest, PolicyVersion, TokenChunk


class VllmStream:
    """One sample.

    Attributes:
        request: What was asked for.
        engine_id: vLLM's id of the current submission; a resubmission gets a new one.
        num_tokens: Tokens so far.
        ended: No further chunk will come.
    """

    def __init__(self, request: GenerateRequest, stamp: Callable[[int], PolicyVersion]) -> None:
        """Prepare a stream; `stamp` is told how many tokens came and gives the version that they have."""
        self.request = request
        self.engine_id = ""
        self.num_tokens = 0
        self.ended = False
        self._stamp = stamp
        self._chunks: asyncio.Queue[TokenChunk | RunError] = asyncio.Queue()
        self._collector: Any = None
        self._pump: asyncio.Task[None] | None = None

    async def next(self) -> TokenChunk:
        """The next chunk; waits for it.

        Raises:
            ActorLostError: vLLM died.
            RunError: The request failed inside vLLM.
        """
        item = await self._chunks.get()
        if isinstance(item, RunError):
            raise item
        return item

    def attach(self, engine_id: str, collector: Any) -> None:
        """Take chunks from a submission, in place of an earlier one if there was any."""
        self.detach()
        self.engine_id = engine_id
        self._collector = collector
        self._pump = asyncio.create_task(self._run(collector), name=f"vllm-stream-{engine_id}")

    def detach(self) -> None:
        """Take no more chunks. The caller aborts the submission in vLLM."""
        if self._pump is not None:
            self._pump.cancel()
        if self._collector is not None:
            self._collector.close()
        self._pump = self._collector = None

    def drain(self) -> None:
        """Take what lies in the collector now, without waiting."""
        if self._collector is None or self.ended:
            return
        try:
            output = self._collector.get_nowait()
            if output is not None:
                self._push(output)
        except Exception as error:
            self.fail(error)

    def abort(self) -> None:
        """End the stream with what it has. Harmless after the end."""
        if not self.ended:
            self._end(TokenChunk(token_ids=(), logprobs=(), policy_version=self._stamp(0), finish_reason=_ABORTED))

    def fail(self, error: Exception) -> None:
        """End the stream with an error. Harmless after the end."""
        if not self.ended:
            if not isinstance(error, RunError):
                error = ActorLostError(f"vLLM failed while it generated {self.request.request_id}: {error}")
            self._end(error)

    async def _run(self, collector: Any) -> None:
        try:
            while not self.ended:
                self._push(collector.get_nowait() or await collector.get())
        except Exception as error:
            self.fail(error)

    def _push(self, output: Any) -> None:
        if self.ended:
            # Aborted while this output was on its way.
            return
        token_ids, logprobs, reason = read_output(output)
        self.num_tokens += len(token_ids)
        chunk = TokenChunk(
            token_ids=token_ids, logprobs=logprobs, policy_version=self._stamp(len(token_ids)), finish_reason=reason
        )
        if reason is not FinishReason.NONE:
            self._end(chunk)
        elif token_ids:
            self._chunks.put_nowait(chunk)

    def _end(self, item: TokenChunk | RunError) -> None:
        self.ended = True
        self._chunks.put_nowait(item)


_ABORTED = FinishReason.ABORTED
