"""Functions that the tests name as prompt sources."""

from collections.abc import Iterator
from typing import Any


def questions(number: int = 3) -> list[str]:
    return [f"question {i}" for i in range(number)]


def endless() -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        yield {"prompt": f"question {number}", "answer": number}
        number += 1


def nothing() -> list[str]:
    return []


def text() -> str:
    return "one question"


def numbers() -> list[int]:
    return [1]
