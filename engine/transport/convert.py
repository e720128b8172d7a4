"""Conversions between the wire's trajectory messages and our own types."""

from typing import Any

import msgspec

from headrace.engine.errors import FormatError
from headrace.engine.types import Message, PolicyVersion, Prompt, PromptGroup, SamplingParams
from headrace.v1 import trajectory_pb2 as pb

_JSON = msgspec.json.Encoder()


def version_to_proto(version: PolicyVersion) -> pb.PolicyVersion:
    return pb.PolicyVersion(incarnation=version.incarnation, version=version.version)


def version_from_proto(message: pb.PolicyVersion) -> PolicyVersion:
    return PolicyVersion(message.incarnation, message.version)


def json_to_text(data: dict[str, Any]) -> str:
    """JSON text of a prompt's data; empty text for an empty object."""
    return _JSON.encode(data).decode() if data else ""


def json_from_text(text: str, where: str) -> dict[str, Any]:
    """The object behind `json_to_text`.

    Raises:
        FormatError: The text is not a JSON object; `where` names it.
    """
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise FormatError(f"{where} is not a JSON object: {error}") from error


def sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        seed=sampling.seed,
    )


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        max_tokens=message.max_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        seed=message.seed if message.HasField("seed") else None,
    )


def prompt_to_proto(prompt: Prompt) -> pb.Prompt:
    return pb.Prompt(
        prompt_id=prompt.prompt_id,
        messages=[pb.ChatMessage(role=m.role, content=m.content) for m in prompt.messages],
        text=prompt.text,
        token_ids=prompt.token_ids,
        data_json=json_to_text(prompt.data),
    )


def prompt_from_proto(message: pb.Prompt) -> Prompt:
    """The prompt behind a message.

    Raises:
        FormatError: Its data is not a JSON object.
    """
    return Prompt(
        prompt_id=message.prompt_id,
        messages=tuple(Message(role=m.role, content=m.content) for m in message.messages),
        text=message.text,
        token_ids=tuple(message.token_ids),
        data=json_from_text(message.data_json, f"the data of prompt {message.prompt_id!r}"),
    )


def group_to_proto(group: PromptGroup) -> pb.PromptGroup:
    return pb.PromptGroup(
        group_id=group.group_id,
        prompt=prompt_to_proto(group.prompt),
        group_size=group.group_size,
        attempt=group.attempt,
        min_version=version_to_proto(group.min_version),
        sampling=sampling_to_proto(group.sampling),
        table=group.table,
    )


def group_from_proto(message: pb.PromptGroup) -> PromptGroup:
    """The group behind a message.

    Raises:
        FormatError: Its prompt's data is not a JSON object.
    """
    return PromptGroup(
        group_id=message.group_id,
        prompt=prompt_from_proto(message.prompt),
        group_size=message.group_size,
        attempt=message.attempt,
        min_version=version_from_proto(message.min_version),
        sampling=sampling_from_proto(message.sampling),
        table=message.table,
    )
