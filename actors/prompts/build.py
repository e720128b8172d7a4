"""From a row of data to a prompt: messages, and the data that a reward will need."""

from collections.abc import Mapping
from typing import Annotated, Any, cast

import msgspec

from headrace.engine.config.schema import DataConfig
from headrace.engine.errors import ConfigError
from headrace.engine.types import Message, Prompt


class PromptFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a question becomes a conversation.

    Attributes:
        prompt_key: The row's key that holds the question, a list of messages with role and content, or a list of
            token ids, which are taken as they are.
        system_prompt: First message, where it is not empty and the row has no system message of its own.
        instruction: Appended to each user turn on a line of its own, where it is not empty.
    """

    prompt_key: str = "prompt"
    system_prompt: str = ""
    instruction: str = ""

    @classmethod
    def from_config(cls, data: DataConfig) -> "PromptFormat":
        return cls(prompt_key=data.prompt_key, system_prompt=data.system_prompt, instruction=data.instruction)


def build_prompt(row: Mapping[str, Any], prompt_format: PromptFormat, *, prompt_id: str, where: str) -> Prompt:
    """The prompt of one row; the other columns become its data.

    Args:
        row: One row of data.
        prompt_format: See there.
        prompt_id: Of the new prompt.
        where: Names the row in errors, e.g. "prompts.jsonl line 3".

    Raises:
        ConfigError: The row has no such key, what is there is not a question, or the data is not JSON.
    """
    key = prompt_format.prompt_key
    if key not in row:
        keys = ", ".join(sorted(map(str, row))) or "none"
        raise ConfigError(f"{where} has no key {key!r}; its keys are: {keys}; set data.prompt_key to one of them")
    data = json_types({name: item for name, item in row.items() if name != key}, where)
    token_ids = _token_ids(row[key], prompt_format, f"{where}, key {key!r},")
    if token_ids:
        return Prompt(prompt_id=prompt_id, token_ids=token_ids, data=data)
    messages = [_with_instruction(m, prompt_format.instruction) for m in _messages(row[key], f"{where}, key {key!r},")]
    if prompt_format.system_prompt and messages[0].role != "system":
        messages.insert(0, Message(role="system", content=prompt_format.system_prompt))
    return Prompt(prompt_id=prompt_id, messages=tuple(messages), data=data)


def prompt_text(prompt: Prompt) -> str:
    """The whole conversation as one text: equal texts are the same question to a policy."""
    if prompt.messages:
        return "\n".join(f"{message.role}: {message.content}" for message in prompt.messages)
    return prompt.text or " ".join(map(str, prompt.token_ids))


def json_types(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The data as JSON types: arrays become lists, numpy numbers numbers, what JSON does not know its text.

    Raises:
        ConfigError: A key is not text or a number, or the data is nested without end.
    """
    try:
        encoded = msgspec.json.encode(dict(data), enc_hook=_plain)
        return msgspec.json.decode(encoded, type=dict[str, Any])
    except (TypeError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{where} holds data that is not JSON: {error}") from error


def _token_ids(value: object, prompt_format: PromptFormat, where: str) -> tuple[int, ...]:
    """The value as token ids, where it is a list of numbers; else nothing."""
    plain: object = _plain(value) if hasattr(value, "tolist") else value
    if not isinstance(plain, list | tuple) or not plain or not isinstance(cast("list[object]", plain)[0], int):
        return ()
    try:
        ids = msgspec.convert(plain, type=tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where} begins like token ids, but is not a list of them: {error}") from error
    if prompt_format.system_prompt or prompt_format.instruction:
        raise ConfigError(
            f"{where} holds token ids, to which data.system_prompt and data.instruction cannot be added; leave "
            "them empty"
        )
    return ids


def _messages(value: object, where: str) -> list[Message]:
    if isinstance(value, str):
        return [Message(role="user", content=value)]
    try:
        plain: object = msgspec.json.decode(msgspec.json.encode(value, enc_hook=_plain))
        messages = msgspec.convert(plain, type=list[Message])
    except (TypeError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{where} holds neither text nor a list of messages with role and content: {error}"
        ) from error
    if not messages:
        raise ConfigError(f"{where} holds an empty list of messages; give at least one user turn")
    return messages


def _with_instruction(message: Message, instruction: str) -> Message:
    if not instruction or message.role != "user":
        return message
    return Message(role=message.role, content=f"{message.content}\n{instruction}")


def _plain(value: Any) -> Any:
    to_list = getattr(value, "tolist", None)  # numpy arrays and scalars
    return to_list() if callable(to_list) else str(value)
