"""How the conformance checks speak: an AssertionError with one sentence."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.engine.errors import HeadraceError

T = TypeVar("T")


def expect(condition: bool, sentence: str) -> None:
    """Raise an AssertionError with `sentence` unless the condition holds; works under `python -O` too.

    Raises:
        AssertionError: The condition is false.
    """
    if not condition:
        raise AssertionError(sentence)


async def within(waiting: Awaitable[T], timeout_s: float, sentence: str) -> T:
    """Await with a limit; `sentence` says what should have come.

    Raises:
        AssertionError: It did not come within `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await waiting
    except TimeoutError:
        raise AssertionError(f"{sentence} (waited {timeout_s} s)") from None


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float, sentence: str) -> None:
    """Ask again and again until the condition holds; the pauses between grow from nothing to 50 ms.

    Raises:
        AssertionError: It did not hold within `timeout_s`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    pause_s = 0.0
    while not await condition():
        if loop.time() > deadline:
            raise AssertionError(f"{sentence} (waited {timeout_s} s)")
        await asyncio.sleep(pause_s)
        pause_s = min(0.05, pause_s * 2 + 0.001)


def expect_error(kind: type[HeadraceError], call: Callable[[], object], sentence: str) -> None:
    """Expect `call` to raise `kind`; `sentence` says when it must.

    Raises:
        AssertionError: It returned, or raised another error.
    """
    try:
        call()
    except kind:
        return
    except Exception as error:
        raise AssertionError(f"{sentence}; {type(error).__name__} was raised instead of {kind.__name__}") from error
    raise AssertionError(f"{sentence}; nothing was raised")
