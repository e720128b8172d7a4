"""The demo's reward: how close a response is to the bare right number.

It pays most for the right number alone, less for the right number after other text, and a little for the right form, so
that a small model has a slope to climb from its first step. Serve it with
`headrace reward serve examples/demo/reward.py:score`.
"""

import re
from typing import Any

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")

RIGHT_AND_BARE = 1.0
RIGHT_AT_THE_END = 0.6
WRONG_BUT_BARE = 0.1


def score(prompt: str, response: str, data: dict[str, Any]) -> dict[str, float]:
    """Score one response.

    Args:
        prompt: Not looked at.
        response: 1.0 for the right number as the whole response, 0.6 where the last number in it is right, 0.1 for a
            bare wrong number, else 0.
        data: `answer` is the right number.
    """
    text = response.strip()
    numbers = _NUMBER.findall(text)
    right = bool(numbers) and float(numbers[-1]) == float(data["answer"])
    bare = _NUMBER.fullmatch(text) is not None
    reward = WRONG_BUT_BARE if bare else 0.0
    if right:
        reward = RIGHT_AND_BARE if bare else RIGHT_AT_THE_END
    return {"reward": reward, "right": float(right), "bare": float(bare)}
