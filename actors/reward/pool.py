"""A pool of killable worker processes around a Python scoring function.

Invariants:
- Each sample gets exactly one outcome; a timeout is TIMEOUT, a crash is ERROR, and neither is ever a value.
- A slot is free or runs one task. Whatever ends a task early (timeout, crash, cancellation) kills its worker and frees
  the slot at once; the next task on that slot starts a new worker, and that start does not count against its timeout.
- No user code runs in this process, so the event loop stays responsive whatever a scorer does.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from headrace.actors.reward.frames import Form, Setup
from headrace.actors.reward.function import timeout_outcome
from headrace.actors.reward.normalise import error_outcome
from headrace.actors.reward.process import WorkerLostError, WorkerProcess
from headrace.engine.config.schema import RewardConfig
from headrace.engine.errors import ConfigError, HeadraceError, UsageError
from headrace.engine.types import RewardOutcome, RewardSample

_MAX_START_BACKOFF_S = 5.0
_ASYNC_GRACE_S = 1.0  # a coroutine is cancelled at its timeout; one that ignores this is killed so much later


@dataclass(slots=True)
class PoolStatistics:
    """Counts since the pool was made.

    Attributes:
        num_scored: Samples that a worker answered, whatever the answer.
        num_timeouts: Samples that got no answer in time.
        num_crashes: Workers that ended by themselves while they had a task.
        num_started: Workers started, replacements included.
    """

    num_scored: int = 0
    num_timeouts: int = 0
    num_crashes: int = 0
    num_started: int = 0


@dataclass(slots=True)
class _Slot:
    worker: WorkerProcess | None = None


class RewardPool:
    """Scores samples with a Python function in worker processes (implements `Reward`)."""

    def __init__(
        self,
        function: str,
        *,
        num_workers: int = 2,
        timeout_s: float = 30.0,
        batch_size: int = 64,
        async_concurrency: int = 16,
        start_timeout_s: float = 120.0,
    ) -> None:
        """Prepare a pool; no process is started yet.

        Args:
            function: `module:function` or `file.py:function`.
            num_workers: Processes, and so plain-function samples at the same time.
            timeout_s: Longest time for one sample; for a batch function, for one call. A worker that takes longer is
                killed and replaced.
            batch_size: Most samples in one call of a batch function.
            async_concurrency: Samples at the same time in each worker of a coroutine function.
            start_timeout_s: Longest time for a worker to import the function.

        Raises:
            ConfigError: `num_workers` or `timeout_s` is not positive, or there is no function.
        """
        if not function or num_workers < 1 or not timeout_s > 0 or batch_size < 1 or async_concurrency < 1:
            raise ConfigError(
                f"a reward pool was asked for with reward.function {function!r}, num_workers {num_workers}, timeout_s "
                f"{timeout_s}, batch_size {batch_size}; name a module:function and give positive numbers"
            )
        self.name = function
        self.statistics = PoolStatistics()
        self._timeout_s = timeout_s
        self._batch_size = batch_size
        self._async_concurrency = async_concurrency
        self._start_timeout_s = start_timeout_s
        self._setup = Setup(function=function, search_path=tuple(p for p in sys.path if p), timeout_s=timeout_s)
        self._slots = [_Slot() for _ in range(num_workers)]
        self._free: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        self._form: Form | None = None
        self._starting = asyncio.Lock()
        self._failed_starts = 0
        self._closed = False
        self._running: set[asyncio.Task[None]] = set()

    @property
    def num_busy(self) -> int:
        """Slots that run a task right now; does not wait."""
        return len(self._slots) - self._free.qsize() if self._form is not None else 0

    @property
    def capacity(self) -> int:
        """Samples (for a batch function, batches) that are scored at the same time; exact once started."""
        return len(self._slots) * (self._async_concurrency if self._form == "async" else 1)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run right now; does not wait."""
        return [slot.worker.pid for slot in self._slots if slot.worker is not None]

    async def start(self) -> None:
        """Start all workers; returns when they have imported the function. Harmless when started; `score` calls it.

        Raises:
            ConfigError: The function cannot be imported or has an unusable signature.
            UsageError: The pool is closed.
        """
        async with self._starting:
            if self._closed:
                raise UsageError(f"the reward pool of {self.name!r} is closed; make a new one")
            if self._form is not None:
                return
            started = await asyncio.gather(*map(self._start_worker, self._slots), return_exceptions=True)
            for result in started:
                if isinstance(result, BaseException):
                    await self._end_workers(0.0)
                    raise ConfigError(str(result)) if isinstance(result, HeadraceError) else result
            worker = self._slots[0].worker
            assert worker is not None
            self._form = worker.form
            for slot in self._slots:
                self._free.put_nowait(slot)

    async def score(self, batch: Sequence[RewardSample]) -> list[RewardOutcome]:
        """One outcome a sample, in order; waits for free workers. Cancelling kills the workers that hold its samples.

        Raises:
            ConfigError: The pool could not be started.
        """
        outcomes: list[RewardOutcome | None] = [None] * len(batch)
        async with contextlib.aclosing(self.outcomes(batch)) as answers:
            async for index, outcome in answers:
                outcomes[index] = outcome
        done = [outcome for outcome in outcomes if outcome is not None]
        assert len(done) == len(batch)
        return done

    async def outcomes(self, batch: Sequence[RewardSample]) -> AsyncGenerator[tuple[int, RewardOutcome], None]:
        """Yield (index in the batch, outcome) as they are ready. Closing the iterator gives up the rest.

        Raises:
            ConfigError: The pool could not be started.
        """
        await self.start()
        answers: asyncio.Queue[tuple[int, RewardOutcome]] = asyncio.Queue()
        chunk = self._chunk_size(len(batch))
        tasks = [
            asyncio.create_task(self._run(batch[start : start + chunk], start, answers))
            for start in range(0, len(batch), chunk)
        ]
        self._running.update(tasks)
        try:
            for _ in range(len(batch)):
                yield await answers.get()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._running.difference_update(tasks)

    async def close(self) -> None:
        """End all workers; running calls get ERROR for what is unfinished. May be called twice."""
        self._closed = True
        async with self._starting:
            for task in list(self._running):
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await self._end_workers(1.0)

    def _chunk_size(self, num_samples: int) -> int:
        per_worker = -(-num_samples // len(self._slots))
        if self._form == "batch":
            return max(1, min(per_worker, self._batch_size))
        if self._form == "async":
            return max(1, min(per_worker, self._async_concurrency))
        return 1

    async def _run(
        self, samples: Sequence[RewardSample], first: int, answers: "asyncio.Queue[tuple[int, RewardOutcome]]"
    ) -> None:
        """Score one chunk on a free slot. Always answers each sample, also when cancelled by `close`."""
        missing = dict(enumerate(samples))
        reason = "the reward pool was closed"
        try:
            slot = await self._free.get()
            try:
                worker = slot.worker or await self._start_worker(slot)
                await self._run_on(worker, slot, missing, first, answers)
            except (WorkerLostError, ConfigError) as error:
                reason = str(error)
            finally:
                self._free.put_nowait(slot)
        finally:
            for index, sample in missing.items():
                message = f"scorer {self.name!r} failed on sample {sample.sample_id!r}: {reason}"
                answers.put_nowait((first + index, error_outcome(sample.sample_id, message)))

    async def _run_on(
        self,
        worker: WorkerProcess,
        slot: _Slot,
        missing: dict[int, RewardSample],
        first: int,
        answers: "asyncio.Queue[tuple[int, RewardOutcome]]",
    ) -> None:
        limit_s = self._timeout_s + (_ASYNC_GRACE_S if worker.form == "async" else 0.0)
        try:
            async with asyncio.timeout(limit_s), contextlib.aclosing(worker.score(list(missing.values()))) as scored:
                async for index, outcome in scored:
                    self.statistics.num_scored += 1
                    missing.pop(index)
                    answers.put_nowait((first + index, outcome))
        except TimeoutError:
            await self._discard(slot)
            self.statistics.num_timeouts += len(missing)
            for index, sample in missing.items():
                answers.put_nowait((first + index, timeout_outcome(self.name, sample.sample_id, self._timeout_s)))
            missing.clear()
        except WorkerLostError as error:
            self.statistics.num_crashes += 1
            raise WorkerLostError(f"{error} ({await self._discard(slot)})") from error
        except BaseException:
            await self._discard(slot)
            raise

    async def _start_worker(self, slot: _Slot) -> WorkerProcess:
        if self._failed_starts:  # the function could be imported once: something else is wrong, do not spin
            await asyncio.sleep(min(_MAX_START_BACKOFF_S, 0.1 * 2.0 ** min(self._failed_starts, 10)))
        try:
            slot.worker = await WorkerProcess.start(self._setup, self._start_timeout_s)
        except HeadraceError:
            self._failed_starts += self._form is not None
            raise
        self._failed_starts = 0
        self.statistics.num_started += 1
        return slot.worker

    async def _discard(self, slot: _Slot) -> str:
        worker, slot.worker = slot.worker, None
        assert worker is not None
        return await worker.kill()

    async def _end_workers(self, grace_s: float) -> None:
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        for slot in self._slots:
            slot.worker = None
        await asyncio.gather(*(worker.close(grace_s) for worker in workers))


def create_pool(config: RewardConfig) -> RewardPool:
    """The pool of `[reward] function = ...`.

    Raises:
        ConfigError: `reward.function` is empty.
    """
    return RewardPool(
        config.function, num_workers=config.num_workers, timeout_s=config.timeout_s, batch_size=config.batch_size
    )
