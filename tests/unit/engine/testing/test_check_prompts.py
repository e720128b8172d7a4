"""The checks of prompt sources and environments pass what is right and name what is wrong."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from headrace.engine.testing import check_environment, check_prompt_source
from headrace.engine.types import GroupOutcome, Message, Prompt, Trajectory


class Numbers:
    """Ten sums, then no more."""

    def __init__(self) -> None:
        self._position = 0

    async def next(self) -> Prompt | None:
        if self._position == 10:
            return None
        self._position += 1
        return self._prompt(self._position)

    def _prompt(self, number: int) -> Prompt:
        return Prompt(prompt_id=f"n-{number}", text=f"{number} + 1 =", data={"answer": str(number + 1)})

    def report(self, prompt_id: str, outcome: GroupOutcome) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._position = state["position"]


class Answer:
    """Done after three turns; answers each with two tokens."""

    def __init__(self) -> None:
        self._turns = 0

    async def reset(self, prompt: Prompt) -> Prompt:
        self._turns = 0
        return prompt

    async def step(self, trajectory: Trajectory) -> "_Step":
        self._turns += 1
        done = self._turns == 3
        return _Step(np.array([] if done else [7, 8], np.int32), done)

    async def close(self) -> None:
        pass


class _Step:
    def __init__(self, observation_token_ids: npt.NDArray[np.int32], done: bool) -> None:
        self.observation_token_ids, self.done = observation_token_ids, done


async def test_a_right_source_and_a_right_environment_conform() -> None:
    await check_prompt_source(Numbers)
    await check_prompt_source(Numbers, num_prompts=15)
    await check_environment(Answer)


class _RepeatsOne(Numbers):
    def restore(self, state: dict[str, Any]) -> None:
        self._position = state["position"] - 1


class _SharesItsState(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        self._shared["position"] = self._position
        return self._shared

    async def next(self) -> Prompt | None:
        prompt = await super().next()
        self._shared["position"] = self._position
        return prompt


class _TwoForms(Numbers):
    def _prompt(self, number: int) -> Prompt:
        return Prompt(prompt_id=f"n-{number}", text="a", messages=(Message(role="user", content="a"),))


class _SameId(Numbers):
    def _prompt(self, number: int) -> Prompt:
        return Prompt(prompt_id="n", text=f"{number} + 1 =")


class _NotJson(Numbers):
    def _prompt(self, number: int) -> Prompt:
        return Prompt(prompt_id=f"n-{number}", text="a", data={"answer": {1, 2}})


class _Restarts(Numbers):
    async def next(self) -> Prompt | None:
        prompt = await super().next()
        if prompt is None:
            self._position = 0
        return prompt


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (_RepeatsOne, "none lost, none repeated"),
        (_SharesItsState, "must not change afterwards"),
        (_TwoForms, "exactly one of messages, text and token_ids"),
        (_SameId, "unique within an epoch"),
        (_NotJson, "JSON types"),
        (_Restarts, "go on giving None"),
    ],
)
async def test_the_check_finds_a_broken_source(broken: type[Numbers], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        await check_prompt_source(broken, num_prompts=15)


class _NeverDone(Answer):
    async def step(self, trajectory: Trajectory) -> _Step:
        return _Step(np.array([7], np.int32), False)


class _LastWord(Answer):
    async def step(self, trajectory: Trajectory) -> _Step:
        return _Step(np.array([7], np.int32), True)


class _Int64(Answer):
    async def step(self, trajectory: Trajectory) -> _Step:
        return _Step(np.array([], np.int64), True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [(_NeverDone, "done within 20 turns"), (_LastWord, "empty observation"), (_Int64, "must be int32")],
)
async def test_the_check_finds_a_broken_environment(broken: type[Answer], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        await check_environment(broken)
