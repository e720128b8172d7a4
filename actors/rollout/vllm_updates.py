# pyright: basic
# vLLM is typed only in part.
"""What vLLM's workers are told during a weight update, all of them together, and what their answers mean.

Two steps: `prepare` while requests run, which touches no parameter, and `store` in a pause.

Invariants:
- `digest` is that of the state which every worker serves; 0 says that none is known to be whole. It moves only when
  all workers have answered.
- A delta is stored by all workers or by none: where some refuse, those that stored it take it back. Where that fails,
  too, nothing is served until a keyframe is.
- A change file is prepared in threads of the workers, which are asked now and then; who waited in a worker would keep
  it from generating.
"""

import asyncio
import logging
from typing import Any

import msgspec

from headrace.actors.rollout.vllm_engine import encode_update
from headrace.engine.errors import WeightUpdateError
from headrace.engine.types import AckStatus, PolicyVersion, UpdateKind, WeightUpdate
from headrace.engine.weights.change_update import ServedState, open_change_update, refusal_status
from headrace.engine.weights.changes import ChangeFile
from headrace.engine.weights.payload import verify_payload

log = logging.getLogger(__name__)

# How often workers are asked whether a change file is prepared.
_FIRST_POLL_S = 0.002
_LAST_POLL_S = 0.05

# A status and its reason.
Refusal = tuple[AckStatus, str]


class WorkerUpdates:
    """The workers of one engine. Not for two updates at a time.

    Attributes:
        digest: Of what they all serve; 0 where no update has been loaded, or the last one left a mixture.
    """

    def __init__(self, engine: Any, dtype: str) -> None:
        """Prepare for a running engine whose weights are `dtype`; `attach` comes next."""
        self._engine = engine
        self._dtype = dtype
        self._layout_hash = 0
        self._no_deltas = "it was not attached"
        self.digest = 0

    async def attach(self) -> None:
        """Find out where the weights lie, and whether deltas can be stored there; says so once in the log.

        Blocks for a read of the checkpoint in each worker, during which nothing may be generated.
        """
        answers = await self._ask("headrace_attach")
        refused = _worst(answers)
        self._no_deltas = refused[1] if refused else ""
        if refused:
            log.warning("This engine takes full weight updates alone, no deltas. %s", refused[1])
        else:
            log.info("This engine takes weight deltas: %s", answers[0][1])

    async def prepare(self, update: WeightUpdate, served: PolicyVersion) -> Refusal | None:
        """Verify an update and have each worker prepare it; why it is refused, if it is. Requests may run."""
        try:
            if update.manifest.kind is UpdateKind.KEYFRAME:
                await asyncio.to_thread(verify_payload, update)
                return _worst(await self._ask("headrace_prepare", encode_update(update)))
            return await self._prepare_delta(update, served)
        except WeightUpdateError as error:
            return refusal_status(error), str(error)

    async def store(self, update: WeightUpdate) -> Refusal | None:
        """Store what was prepared; call it while nothing is generated. Returns why that failed, if it did.

        After a failure `digest` tells whether it was taken back. Of a keyframe nothing is.
        """
        if update.manifest.kind is UpdateKind.DELTA:
            return await self._store_delta(update.manifest.digest)
        answers = await self._ask("headrace_load")
        failed = _failure(answers, update.manifest.digest)
        if failed:
            self.forget()
        else:
            self.digest, self._layout_hash = update.manifest.digest, update.manifest.layout_hash
        return failed

    def forget(self) -> None:
        """Nothing whole is served any more: no delta is taken until a keyframe is."""
        self.digest = self._layout_hash = 0

    async def _prepare_delta(self, update: WeightUpdate, served: PolicyVersion) -> Refusal | None:
        if self._no_deltas:
            return AckStatus.UNKNOWN_LAYOUT, f"This engine takes no deltas ({self._no_deltas}); send keyframes."
        manifest = update.manifest
        state = ServedState(version=served, digest=self.digest, layout_hash=self._layout_hash)
        await asyncio.to_thread(open_change_update, update, state)
        other = next((spec for spec in manifest.tensors if spec.dtype != self._dtype), None)
        if other is not None:
            # Its bits would be taken for those of the served dtype.
            return AckStatus.UNKNOWN_LAYOUT, f"{other.name!r} is {other.dtype}; deltas have to be {self._dtype}."
        file = ChangeFile(path=update.local_path, digest=manifest.digest)
        refused = _worst(await self._ask("headrace_stage", msgspec.msgpack.encode(file)))
        if refused:
            return refused
        delay_s = _FIRST_POLL_S
        while any(await self._ask("headrace_staging")):
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LAST_POLL_S)
        return _worst(await self._ask("headrace_staged"))

    async def _store_delta(self, digest: int) -> Refusal | None:
        answers = await self._ask("headrace_apply")
        failed = _failure(answers, digest)
        if failed is None:
            self.digest = digest
            return None
        if any(answer[2] != self.digest for answer in answers):
            # Some have stored it. A worker that has nothing to take back says so and is where it was.
            answers = await self._ask("headrace_revert")
        if any(answer[2] != self.digest for answer in answers):
            self.forget()
        return failed

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = await self._engine.collective_rpc(method, args=args)
        return answers


def _worst(answers: list[list[Any]]) -> Refusal | None:
    """The first answer that is not SERVING, or None."""
    for rank, (status, message, _) in enumerate(answers):
        if status != AckStatus.SERVING:
            return AckStatus(status), f"Worker {rank}: {message}"
    return None


def _failure(answers: list[list[Any]], digest: int) -> Refusal | None:
    """FAILED and why, unless all workers serve the state with this digest."""
    worst = _worst(answers)
    if worst is not None:
        return AckStatus.FAILED, worst[1]
    if any(answer[2] != digest for answer in answers):
        return AckStatus.FAILED, "a worker answers with another digest"
    return None
