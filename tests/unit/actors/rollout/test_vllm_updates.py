"""What the answers of several workers mean together: all serve an update, or none does."""

import itertools
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.rollout.vllm_updates import WorkerUpdates
from headrace.engine.testing.delta_samples import damaged_copy, flipped_signs, make_change_update, state_of
from headrace.engine.testing.plain_weights import PlainSender, as_update
from headrace.engine.types import AckStatus, PolicyVersion, TensorSpec, WeightUpdate

V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)
TENSORS = (TensorSpec(name="a", dtype="bfloat16", shape=(30, 3)), TensorSpec(name="b", dtype="bfloat16", shape=(5,)))


class Worker:
    """Serves digests alone, by the rules of a real worker.

    Attributes:
        digest: Of what it serves.
        refuse: What goes wrong, by method: a status, and the digest that is served afterwards (None: the one before).
        num_staging: How often it says that it is still preparing.
    """

    def __init__(self) -> None:
        self.digest = 0
        self.refuse: dict[str, tuple[AckStatus, int | None]] = {}
        self.num_staging = 0
        self._prepared = 0
        self._before: int | None = None

    def __call__(self, method: str, *args: Any) -> Any:
        if method == "headrace_staging":
            self.num_staging -= 1
            return self.num_staging >= 0
        if method == "headrace_apply":
            self._before = None
        if method in self.refuse:
            status, digest = self.refuse[method]
            self.digest = self.digest if digest is None else digest
            return [int(status), f"{method} is refused", self.digest]
        if method == "headrace_prepare":
            self._prepared = msgspec.msgpack.decode(args[0])["manifest"]["digest"]
        elif method == "headrace_stage":
            self._prepared = msgspec.msgpack.decode(args[0])["digest"]
        elif method in ("headrace_load", "headrace_apply"):
            self._before, self.digest = self.digest, self._prepared
        elif method == "headrace_revert":
            if self._before is None:
                return [int(AckStatus.FAILED), "No update is there to be taken back.", self.digest]
            self.digest = self._before
        return [int(AckStatus.SERVING), "2 tensors in place", self.digest]


class Engine:
    """Two workers, and what they were asked."""

    def __init__(self) -> None:
        self.workers = [Worker(), Worker()]
        self.asked: list[str] = []

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.asked.append(method)
        return [worker(method, *args) for worker in self.workers]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def base(tmp_path: Path) -> WeightUpdate:
    return as_update(PlainSender(0, TENSORS).part(V1, tmp_path))


@pytest.fixture
def delta(base: WeightUpdate, tmp_path: Path) -> WeightUpdate:
    return make_change_update(base, flipped_signs(state_of(base)), V2, tmp_path / "delta")


@pytest.fixture
def serving(engine: Engine, base: WeightUpdate) -> Callable[[], Awaitable[WorkerUpdates]]:
    async def attached() -> WorkerUpdates:
        updates = WorkerUpdates(engine, "bfloat16")
        await updates.attach()
        assert await updates.prepare(base, PolicyVersion(0, 0)) is None
        assert await updates.store(base) is None
        assert updates.digest == base.manifest.digest
        engine.asked.clear()
        return updates

    return attached


Serving = Callable[[], Awaitable[WorkerUpdates]]


async def test_a_delta_is_prepared_without_waiting_in_the_workers_and_stored_by_all(
    engine: Engine, serving: Serving, delta: WeightUpdate
) -> None:
    updates = await serving()
    engine.workers[0].num_staging, engine.workers[1].num_staging = 1, 3
    assert await updates.prepare(delta, V1) is None
    assert engine.asked == ["headrace_stage", *["headrace_staging"] * 4, "headrace_staged"]
    assert await updates.store(delta) is None
    assert {worker.digest for worker in engine.workers} == {updates.digest} == {delta.manifest.digest}


@pytest.mark.parametrize("failing", [0, 1])
async def test_where_one_worker_takes_a_delta_back_the_other_does_so_too(
    engine: Engine, serving: Serving, base: WeightUpdate, delta: WeightUpdate, tmp_path: Path, failing: int
) -> None:
    updates = await serving()
    for _ in range(2):  # after a delta that all have stored, too: it must not be taken back with the next one
        engine.workers[failing].refuse = {"headrace_apply": (AckStatus.FAILED, None)}
        served = updates.digest
        assert await updates.prepare(delta, delta.manifest.base or V1) is None
        refused = await updates.store(delta)
        assert refused == (AckStatus.FAILED, f"Worker {failing}: headrace_apply is refused")
        assert {worker.digest for worker in engine.workers} == {updates.digest} == {served}
        engine.workers[failing].refuse = {}
        assert await updates.prepare(delta, delta.manifest.base or V1) is None
        assert await updates.store(delta) is None
        before = flipped_signs(state_of(base))
        path = tmp_path / "following"
        delta = make_change_update(delta, state_of(base), PolicyVersion(0, 3), path, before=before)


@pytest.mark.parametrize(
    "refuse",
    [
        [{"headrace_apply": (AckStatus.FAILED, 0)}, {}],
        [{"headrace_apply": (AckStatus.FAILED, None)}, {"headrace_revert": (AckStatus.FAILED, 0)}],
        [{"headrace_apply": (AckStatus.FAILED, None)}, {"headrace_revert": (AckStatus.FAILED, None)}],
    ],
)
async def test_a_mixture_is_never_served_and_a_keyframe_ends_it(
    engine: Engine,
    serving: Serving,
    base: WeightUpdate,
    delta: WeightUpdate,
    refuse: list[dict[str, tuple[AckStatus, int | None]]],
) -> None:
    updates = await serving()
    assert await updates.prepare(delta, V1) is None
    for worker, refusal in zip(engine.workers, refuse, strict=True):
        worker.refuse = refusal
    failed = await updates.store(delta)
    assert failed is not None
    assert (failed[0], updates.digest) == (AckStatus.FAILED, 0)
    for worker in engine.workers:
        worker.refuse = {}
    refused = await updates.prepare(delta, V1)
    assert refused is not None
    assert refused[0] is AckStatus.WRONG_BASE
    assert await updates.prepare(base, V1) is None
    assert await updates.store(base) is None
    assert updates.digest == base.manifest.digest
    assert await updates.prepare(delta, V1) is None


async def test_a_refusal_while_it_is_prepared_stores_nothing(
    engine: Engine, serving: Serving, delta: WeightUpdate, tmp_path: Path
) -> None:
    updates = await serving()
    refused = await updates.prepare(damaged_copy(delta, tmp_path / "damaged"), V1)
    assert refused is not None
    assert refused[0] is AckStatus.CORRUPT
    assert (await updates.prepare(delta, V2) or [None])[0] is AckStatus.WRONG_BASE
    assert engine.asked == []
    for method, status in itertools.product(["headrace_stage", "headrace_staged"], [AckStatus.CORRUPT]):
        engine.workers[1].refuse = {method: (status, None)}
        assert await updates.prepare(delta, V1) == (status, f"Worker 1: {method} is refused")
    assert "headrace_apply" not in engine.asked


async def test_an_engine_that_cannot_take_deltas_says_so_once_and_takes_keyframes(
    engine: Engine, base: WeightUpdate, delta: WeightUpdate, caplog: pytest.LogCaptureFixture
) -> None:
    updates = WorkerUpdates(engine, "bfloat16")
    engine.workers[1].refuse = {"headrace_attach": (AckStatus.UNKNOWN_LAYOUT, None)}
    with caplog.at_level(logging.WARNING):
        await updates.attach()
        assert await updates.prepare(base, V1) is None
        assert await updates.store(base) is None
        for _ in range(2):
            refused = await updates.prepare(delta, V1)
            assert refused is not None
            assert refused[0] is AckStatus.UNKNOWN_LAYOUT
            assert "Worker 1: headrace_attach is refused" in refused[1]
    assert len(caplog.records) == 1


async def test_a_delta_in_another_dtype_than_is_served_is_refused(
    engine: Engine, base: WeightUpdate, delta: WeightUpdate
) -> None:
    updates = WorkerUpdates(engine, "float16")
    await updates.attach()
    assert await updates.prepare(base, V1) is None
    assert await updates.store(base) is None
    refused = await updates.prepare(delta, V1)
    assert refused is not None
    assert (refused[0], "deltas have to be float16" in refused[1]) == (AckStatus.UNKNOWN_LAYOUT, True)
