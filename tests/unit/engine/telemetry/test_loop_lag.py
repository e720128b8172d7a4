import asyncio

import pytest

from headrace.engine.telemetry import LoopLag


class FakeTime:
    """A clock whose sleepers wake when the test says so, as late as it says."""

    def __init__(self) -> None:
        self.now = 100.0
        self.wake = asyncio.Event()

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    async def sleep(self, _seconds: float) -> None:
        await self.wake.wait()
        self.wake.clear()

    async def wake_at(self, now: float) -> None:
        self.now = now
        self.wake.set()
        for _ in range(3):
            await asyncio.sleep(0)


async def test_the_worst_lag_since_the_last_reading_is_told_once() -> None:
    time = FakeTime()
    lag = LoopLag(time, interval_s=1.0, sleep=time.sleep)
    assert lag.take() == 0.0
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    await time.wake_at(101.0)
    assert lag.take() == pytest.approx(0.0)
    await time.wake_at(102.5)
    await time.wake_at(103.6)
    assert lag.take() == pytest.approx(0.5)
    assert lag.take() == 0.0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_reader_that_runs_before_the_late_wake_up_sees_the_stall_and_only_it() -> None:
    time = FakeTime()
    lag = LoopLag(time, interval_s=1.0, sleep=time.sleep)
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    time.now = 104.0
    assert lag.take() == pytest.approx(3.0)
    await time.wake_at(104.0)
    assert lag.take() == pytest.approx(0.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
