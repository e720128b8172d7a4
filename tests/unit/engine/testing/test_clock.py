"""Time that stands still until a test moves it."""

import asyncio

from headrace.engine.testing import FakeClock


async def test_sleepers_wake_in_the_order_of_their_times_and_read_those_times() -> None:
    clock = FakeClock(monotonic=10.0, wall=1000.0)
    seen: list[tuple[str, float]] = []

    async def tick(name: str, period_s: float) -> None:
        while True:
            await clock.sleep(period_s)
            seen.append((name, clock.monotonic()))

    tasks = [asyncio.create_task(tick("a", 2.0)), asyncio.create_task(tick("b", 3.0))]
    await clock.run_for(6.5)
    assert seen == [("a", 12.0), ("b", 13.0), ("a", 14.0), ("b", 16.0), ("a", 16.0)]
    assert (clock.monotonic(), clock.wall()) == (16.5, 1006.5)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert clock.num_sleepers == 0


async def test_advance_wakes_whoever_is_due_and_nobody_else() -> None:
    clock = FakeClock()
    early, late = asyncio.create_task(clock.sleep(1.0)), asyncio.create_task(clock.sleep(2.0))
    await clock.sleep(0)
    clock.advance(1.0)
    await early
    assert not late.done()
    clock.advance(1.0)
    await late
