"""Conformance of a `PromptSource` and of an `Environment`."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from headrace.engine.interfaces import Environment, PromptSource
from headrace.engine.testing.expect import expect, within
from headrace.engine.testing.samples import make_trajectory
from headrace.engine.types import DropReason, GroupOutcome, Prompt


def _check_prompt(prompt: Prompt, what: str) -> None:
    expect(bool(prompt.prompt_id), f"{what} must have a prompt_id")
    forms = bool(prompt.messages) + bool(prompt.text) + bool(prompt.token_ids)
    expect(forms == 1, f"{what} must have exactly one of messages, text and token_ids")
    try:
        round_trip = json.loads(json.dumps(prompt.data, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"the data of {what} must be made of JSON types: {error}") from error
    expect(round_trip == prompt.data, f"the data of {what} must come back equal from JSON")


async def check_prompt_source(
    factory: Callable[[], PromptSource], *, num_prompts: int = 6, timeout_s: float = 60.0
) -> None:
    """Run every rule of `PromptSource` against two sources.

    Args:
        factory: Makes a source at its beginning, always the same one; called twice.
        num_prompts: Prompts to draw, half before and half after the state is taken; at least 2, at most one epoch's.
            With a few more than the source has, its end is checked too.
        timeout_s: For each single wait; a source that waits for a client must have been fed by the factory.

    Raises:
        AssertionError: With one sentence on the first rule that is broken.
    """
    source = factory()

    async def draw(from_source: PromptSource, count: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        for _ in range(count):
            prompt = await within(from_source.next(), timeout_s, "next() must return")
            if prompt is None:
                again = await within(from_source.next(), timeout_s, "next() must return after the end")
                expect(again is None, "next() must go on giving None once there are no more prompts")
                break
            _check_prompt(prompt, "a prompt")
            prompts.append(prompt)
        return prompts

    head = await draw(source, num_prompts // 2)
    expect(bool(head), "a source must have at least one prompt")
    source.report(head[0].prompt_id, GroupOutcome(group_id="a", trained_at_step=1, mean_reward=0.5))
    source.report(head[-1].prompt_id, GroupOutcome(group_id="b", dropped=DropReason.STALE))
    state: dict[str, Any] = source.state()
    text = json.dumps(state, allow_nan=False)
    expect(source.state() == state, "state() must not move the source")
    tail = await draw(source, num_prompts - len(head))
    expect(bool(tail), "the source ended within the first half of num_prompts; lower it")
    ids = [prompt.prompt_id for prompt in [*head, *tail]]
    expect(len(set(ids)) == len(ids), "prompt ids must be unique within an epoch")
    expect(json.dumps(state) == text, "a state that was handed out must not change afterwards")
    restored = factory()
    restored.restore(json.loads(text))
    repeated = await draw(restored, len(tail))
    same = [msgspec.to_builtins(p) for p in repeated] == [msgspec.to_builtins(p) for p in tail]
    expect(same, "restore() must continue with the very prompts that came after state(): none lost, none repeated")


async def check_environment(
    factory: Callable[[], Environment], prompt: Prompt | None = None, *, max_turns: int = 20, timeout_s: float = 60.0
) -> None:
    """Run every rule of `Environment` against one environment.

    Args:
        factory: Makes an environment; called once.
        prompt: To begin with.
        max_turns: Turns of a policy that says the same each time, by which the environment must be done.
        timeout_s: For each single wait.

    Raises:
        AssertionError: With one sentence on the first rule that is broken.
    """
    environment = factory()
    prompt = prompt or Prompt(prompt_id="p", text="2 + 2 =", data={"answer": "4"})
    try:
        for _ in range(2):  # a second conversation after the first
            first = await within(environment.reset(prompt), timeout_s, "reset() must return")
            _check_prompt(first, "the first observation")
            done = False
            for _ in range(max_turns):
                step = await within(environment.step(make_trajectory()), timeout_s, "step() must return")
                observation = step.observation_token_ids
                expect(observation.dtype == np.int32, "an observation must be int32")
                expect(observation.ndim == 1, "an observation must have shape [K]")
                expect(not (step.done and observation.size), "the last turn must have an empty observation")
                if step.done:
                    done = True
                    break
            expect(done, f"an environment must be done within {max_turns} turns")
    finally:
        await within(environment.close(), timeout_s, "close() must return")
    await within(environment.close(), timeout_s, "a second close() must return")
