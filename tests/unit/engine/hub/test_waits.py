"""Waiting with a deadline and a reason."""

import asyncio

import pytest

from headrace.engine.clock import SystemClock
from headrace.engine.errors import DeadlineError, StoppedError
from headrace.engine.hub.waits import Changes, Wait, WaitBoard


def make() -> tuple[SystemClock, WaitBoard, Changes]:
    clock = SystemClock()
    board = WaitBoard(clock)
    return clock, board, Changes(clock, board)


def wait_for(what: str, deadline_s: float = float("inf")) -> Wait:
    return Wait(role="learner", member="learner-0", waits_for=what, on_whom="rollout-0", deadline_s=deadline_s)


async def test_a_condition_that_holds_does_not_wait() -> None:
    _, board, changes = make()
    await changes.wait_until(lambda: True, wait_for("nothing", deadline_s=0.0))
    assert board.listing() == []


async def test_a_wait_is_on_the_board_while_it_lasts_and_ends_with_the_change() -> None:
    _, board, changes = make()
    state = {"ready": False}
    waiting = asyncio.create_task(changes.wait_until(lambda: state["ready"], wait_for("a batch")))
    await asyncio.sleep(0)
    (listed,) = board.listing()
    assert (listed.waits_for, listed.on_whom) == ("a batch", "rollout-0")
    assert listed.since_s > 0
    changes.notify()  # a change that does not help
    await asyncio.sleep(0)
    assert not waiting.done()
    state["ready"] = True
    changes.notify()
    await waiting
    assert board.listing() == []


async def test_the_deadline_says_what_was_waited_for_and_on_whom() -> None:
    clock, board, changes = make()
    with pytest.raises(DeadlineError, match=r"learner learner-0 waited in vain for a batch from rollout-0"):
        await changes.wait_until(lambda: False, wait_for("a batch", deadline_s=clock.monotonic() + 0.01))
    assert board.listing() == []


async def test_cancelling_a_wait_leaves_nothing_on_the_board() -> None:
    _, board, changes = make()
    waiting = asyncio.create_task(changes.wait_until(lambda: False, wait_for("a batch")))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert board.listing() == []


async def test_a_condition_that_raises_ends_the_wait_with_its_error() -> None:
    _, board, changes = make()
    state = {"ended": False}

    def ready() -> bool:
        if state["ended"]:
            raise StoppedError("the run is ending")
        return False

    waiting = asyncio.create_task(changes.wait_until(ready, wait_for("a batch")))
    await asyncio.sleep(0)
    state["ended"] = True
    changes.notify()
    with pytest.raises(StoppedError):
        await waiting
    assert board.listing() == []


async def test_every_waiter_hears_of_a_change_made_while_others_wake() -> None:
    _, _, changes = make()
    seen: list[int] = []
    level = {"value": 0}

    async def waiter(number: int) -> None:
        await changes.wait_until(lambda: level["value"] >= number, wait_for(f"level {number}"))
        seen.append(number)
        level["value"] += 1
        changes.notify()

    tasks = [asyncio.create_task(waiter(number)) for number in range(1, 6)]
    await asyncio.sleep(0)
    level["value"] = 1
    changes.notify()
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert seen == [1, 2, 3, 4, 5]
