from typing import Any

import numpy as np
import pytest

from headrace.actors.prompts.build import PromptFormat, build_prompt, prompt_text
from headrace.engine.errors import ConfigError
from headrace.engine.types import Message, Prompt

ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


def build(row: dict[str, Any], **options: Any) -> Prompt:
    return build_prompt(row, PromptFormat(**options), prompt_id="0-1", where="file line 2")


def test_a_question_becomes_a_conversation_and_the_other_columns_its_data() -> None:
    prompt = build({"prompt": "1 + 1 =", "answer": "2"}, system_prompt="Be brief.", instruction="Answer with a number.")
    assert prompt.prompt_id == "0-1" and prompt.data == {"answer": "2"}
    assert prompt.messages == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="1 + 1 =\nAnswer with a number."),
    )
    assert prompt_text(prompt) == "system: Be brief.\nuser: 1 + 1 =\nAnswer with a number."


def test_a_conversation_keeps_its_own_system_prompt_and_each_user_turn_gets_the_instruction() -> None:
    turns = [("system", "Own."), ("user", "a"), ("assistant", "b"), ("user", "c")]
    row = {"chat": np.array([{"role": role, "content": content} for role, content in turns])}
    prompt = build(row, prompt_key="chat", system_prompt="Not this.", instruction="!")
    assert [message.content for message in prompt.messages] == ["Own.", "a\n!", "b", "c\n!"]


def test_data_becomes_json_types() -> None:
    prompt = build({"prompt": "q", "a": np.float32(0.5), "b": np.arange(2), "c": (1, 2), "d": {3: None}, "e": 1j})
    assert prompt.data == {"a": 0.5, "b": [0, 1], "c": [1, 2], "d": {"3": None}, "e": "1j"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"question": "q", "answer": "a"},
            "file line 2 has no key 'prompt'; its keys are: answer, question; set data.prom",
        ),
        ({}, "its keys are: none"),
        ({"prompt": 3}, "key 'prompt', holds neither text nor a list of messages"),
        ({"prompt": [{"role": "user"}]}, "neither text nor a list of messages"),
        ({"prompt": []}, "an empty list of messages"),
        ({"prompt": "q", "a": ENDLESS}, "not JSON"),
    ],
)
def test_what_is_no_prompt_is_one_sentence_that_says_where(row: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match="file line 2") as caught:
        build(row)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_list_of_numbers_is_taken_as_token_ids() -> None:
    row = {"prompt": [5, 6, 7], "answer": 1}
    prompt = build_prompt(row, PromptFormat(), prompt_id="p", where="row 1")
    assert (prompt.token_ids, prompt.messages, prompt.data) == ((5, 6, 7), (), {"answer": 1})


@pytest.mark.parametrize(
    ("value", "prompt_format", "words"),
    [
        ([1, "two"], PromptFormat(), "begins like token ids"),
        ([1, -2], PromptFormat(), "begins like token ids"),
        ([1, 2], PromptFormat(instruction="be brief"), "data.instruction cannot be added"),
    ],
)
def test_token_ids_that_cannot_be_used_are_refused(value: object, prompt_format: PromptFormat, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_prompt({"prompt": value}, prompt_format, prompt_id="p", where="row 1")
