"""A coroutine scorer: many samples wait for a judge at the same time in one worker. Here the judge is a stand-in.

Run `headrace reward serve async_judge.py:score --workers 1 --timeout 20`.
"""

import asyncio
from typing import Any


async def ask_judge(question: str, answer: str) -> int:
    """Stands for a request to a judge; gives marks from 0 to 10."""
    await asyncio.sleep(0.05)
    return min(10, len(set(answer.split()) & set(question.split())))


async def score(prompt: str, response: str, data: dict[str, Any]) -> dict[str, float] | None:
    """The judge's marks, scaled to 0..1; None, "not scored", where there is nothing to judge."""
    if not response.strip():
        return None
    marks = await ask_judge(prompt, response)
    return {"reward": marks / 10, "judge/marks": marks}
