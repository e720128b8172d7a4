# pyright: basic
# torch and transformers are typed only in part.
"""The thread in which `TransformersBackend` generates.

Invariants:
- This thread owns the model, the batch, the version and the paused flag; everything else asks it through commands,
  which it runs between two iterations. So no iteration sees two versions. Deltas are prepared elsewhere, which reads
  the parameters only.
- A sample ends exactly once: with a finish reason, or with an error.
"""

import asyncio
import collections
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from headrace.actors.models import load_tokenizer
from headrace.actors.rollout.checkpoint import end_token_ids
from headrace.actors.rollout.transformers_batch import DecodeBatch, Row, Sampled
from headrace.actors.rollout.transformers_weights import ModuleWeights
from headrace.actors.rollout.weight_scatter import StagedUpdate
from headrace.engine.config.hardware import model_dtype
from headrace.engine.config.schema import Config
from headrace.engine.errors import ActorLostError, HeadraceError, RunError, WeightUpdateError
from headrace.engine.types import AckStatus, FinishReason, PauseMode, PolicyVersion, TokenChunk, WeightAck, WeightUpdate
from headrace.engine.weights.change_update import ServedState, refusal_status

T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class Sample(Row):
    """A row and the iterator that waits for its chunks."""

    loop: asyncio.AbstractEventLoop
    chunks: asyncio.Queue[TokenChunk | HeadraceError]

    def send(self, item: TokenChunk | HeadraceError) -> None:
        # A loop that is closed has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.chunks.put_nowait, item)


class GenerationLoop:
    """A worker thread with a model, and the commands that reach it. `served` and the counters may be read anywhere."""

    def __init__(self, config: Config, model_dir: Path, version: PolicyVersion) -> None:
        self.served = ServedState(version=version)
        self.num_tokens = 0
        self._config = config
        self._model_dir = model_dir
        self._end_ids = end_token_ids(model_dir)
        self._broken = ""
        self._paused = False
        self._closing = False
        self._waiting: collections.deque[Sample] = collections.deque()
        self._commands: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._batch: DecodeBatch | None = None
        self._weights: ModuleWeights | None = None
        self._tokenizer: Any = None

    @property
    def num_running(self) -> int:
        """Samples in the batch."""
        return len(self._batch.rows) if self._batch else 0

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a place in it."""
        return sum(1 for sample in list(self._waiting) if not sample.cancelled)

    def start(self) -> None:
        """Start the thread; `load_model` comes next."""
        self._thread = threading.Thread(target=self._run, name="headrace-transformers", daemon=True)
        self._thread.start()

    def add(self, sample: Sample) -> None:
        """Queue a sample.

        Raises:
            ActorLostError: The thread is not running.
        """
        with self._wake:
            self._check_running()
            self._waiting.append(sample)
            self._wake.notify()

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function in the worker thread between two iterations, and wait for it.

        Raises:
            ActorLostError: The thread is not running.
        """
        future: Future[T] = Future()
        with self._wake:
            self._check_running()
            self._commands.append((future, function))
            self._wake.notify()
        # Shielded: a command that has been handed over runs, whether its caller still waits or not.
        return await asyncio.shield(asyncio.wrap_future(future))

    def close(self) -> None:
        """End every sample (finish ABORTED) and the thread; blocks until it is gone. May be called twice."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _check_running(self) -> None:
        if self._closing or self._thread is None:
            raise ActorLostError("The backend is not running; it was closed or never started.")

    def stage(self, update: WeightUpdate) -> StagedUpdate | None:
        """Verify an update, and prepare it if it is a delta; blocks, in any thread, while the model generates.

        Raises:
            ActorLostError: The thread is not running.
            WeightUpdateError: The update is refused; see `ModuleWeights.stage`.
        """
        if self._weights is None:
            raise ActorLostError("The backend is not running; it was never started.")
        return self._weights.stage(update, self.served)

    # What follows runs in the worker thread.

    def pause(self, mode: PauseMode) -> None:
        """Stop iterating; after ABORT every sample ends with what it has."""
        self._paused = True
        if mode is PauseMode.ABORT:
            self._end_all()

    def resume(self) -> None:
        """Iterate again."""
        self._paused = False

    def _run(self) -> None:
        torch.set_num_threads(self._config.rollout.threads)
        while True:
            with self._wake:
                while not (self._commands or self._closing or self._has_work()):
                    self._wake.wait()
                commands, self._commands = self._commands, []
            for future, function in commands:
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
            if self._closing:
                self._end_all()
                return
            if self._has_work():
                self._iterate()

    def _has_work(self) -> bool:
        return not self._paused and self._batch is not None and bool(self._waiting or self._batch.rows)

    def _iterate(self) -> None:
        assert self._batch is not None
        try:
            self._batch.remove([row for row in self._batch.rows if row.cancelled])
            new = self._take_waiting(self._config.rollout.max_num_seqs - len(self._batch.rows))
            # Running rows first: the new ones get their first token from their prompt.
            if self._batch.rows:
                self._deliver(self._batch.step())
            if new:
                self._deliver(self._batch.admit(new))
        except Exception as error:
            # Out of memory, most likely. The rows are lost, the backend is not.
            failure = RunError(f"The iteration failed: {type(error).__name__}: {error}")
            rows = [*self._batch.rows, *self._waiting]
            self._batch.remove(self._batch.rows)
            self._waiting.clear()
            for row in rows:
                _sample_of(row).send(failure)

    def _take_waiting(self, room: int) -> list[Sample]:
        taken: list[Sample] = []
        while self._waiting and len(taken) < room:
            sample = self._waiting.popleft()
            if sample.cancelled:
                continue
            if self._broken:
                sample.send(WeightUpdateError(self._broken))
            elif self.served.version < sample.request.min_version:
                sample.send(
                    WeightUpdateError(
                        f"Request {sample.request.request_id} needs version {sample.request.min_version}; "
                        f"this backend serves {self.served.version}."
                    )
                )
            else:
                taken.append(sample)
        return taken

    def _deliver(self, sampled: list[Sampled]) -> None:
        self.num_tokens += len(sampled)
        for item in sampled:
            _sample_of(item.row).send(
                TokenChunk(
                    token_ids=(item.token_id,),
                    logprobs=(item.logprob,),
                    policy_version=self.served.version,
                    finish_reason=item.finish_reason,
                )
            )

    def _end_all(self) -> None:
        rows = [*(self._batch.rows if self._batch else ()), *self._waiting]
        if self._batch:
            self._batch.remove(self._batch.rows)
        self._waiting.clear()
        aborted = TokenChunk(
            token_ids=(), logprobs=(), policy_version=self.served.version, finish_reason=FinishReason.ABORTED
        )
        for row in rows:
            _sample_of(row).send(aborted)

    def load_model(self) -> None:
        """Load the checkpoint onto the accelerator, or the CPU where there is none.

        Raises:
            RunError: It could not be loaded.
        """
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                self._model_dir,
                dtype=getattr(torch, model_dtype(self._config)),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,  # other formats would be unpickled
            )
        except Exception as error:
            raise RunError(f"{self._model_dir} could not be loaded: {type(error).__name__}: {error}") from error
        model = model.to(device).eval()
        self._weights = ModuleWeights(model)
        self._batch = DecodeBatch(model, self._end_ids)

    def store(self, update: WeightUpdate, staged: StagedUpdate | None) -> WeightAck:
        """Store what `stage` has prepared, or load a full update, and move the version; or say why not."""
        assert self._weights is not None
        started = time.monotonic()
        manifest = update.manifest
        try:
            if staged is None:
                self._weights.load(update)
            else:
                self._weights.apply(staged)
        except WeightUpdateError as error:
            return self.ack(refusal_status(error), str(error))
        except Exception as error:
            self.served = ServedState(version=self.served.version)
            self._broken = f"Nothing is served after a failed update, until a full update succeeds: {error}"
            self._end_all()
            return self.ack(AckStatus.FAILED, self._broken)
        self.served = ServedState(version=manifest.version, digest=manifest.digest, layout_hash=manifest.layout_hash)
        self._broken = ""
        return self.ack(AckStatus.SERVING, "", time.monotonic() - started)

    def decode(self, token_ids: list[int]) -> str:
        """Text of ids; loads the tokenizer the first time."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._model_dir)
        return str(self._tokenizer.decode(token_ids))

    def ack(self, status: AckStatus, message: str, taken_s: float = 0.0) -> WeightAck:
        """An acknowledgement that names what is served now."""
        return WeightAck(
            version=self.served.version,
            status=status,
            digest=self.served.digest,
            message=message,
            pause_s=taken_s,
            apply_s=taken_s,
        )


def _sample_of(row: Row) -> Sample:
    assert isinstance(row, Sample)
    return row
