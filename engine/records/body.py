"""The msgpack body of an encoded trajectory: its typed structs and how they are read."""

from collections.abc import Iterable
from typing import Annotated, Any, TypeVar, cast

import msgspec

from headrace.engine.errors import FormatError, InputError
from headrace.engine.records.frame import ArrayEntry, Frame, Uint32, Uint63
from headrace.engine.types import FinishReason, PolicyVersion, VersionSpan

# Nesting of a prompt's data that a reader follows; the outermost object counts as 1.
MAX_DATA_DEPTH = 32

GroupSize = Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]


class IndexBody(msgspec.Struct, frozen=True):
    """The part of the body that an index needs; spans are (incarnation, version, tokens)."""

    record_id: str
    group_id: str
    sample_index: Uint32
    group_size: GroupSize
    attempt: Uint32
    num_loss_tokens: Uint63
    spans: tuple[tuple[Uint32, Uint63, Uint63], ...]
    arrays: tuple[ArrayEntry, ...]


class TrajectoryBody(IndexBody, frozen=True, kw_only=True):
    """The whole body. Keys are never renamed or reused; new ones need a default."""

    prompt_id: str
    finish_reason: FinishReason
    temperature: float
    prompt_text: str = ""
    response_text: str = ""
    # JSON rather than msgpack: it has no announced lengths, and it is what the protobuf messages carry.
    data_json: str = "{}"
    started_at_s: float = 0.0
    finished_at_s: float = 0.0


BodyT = TypeVar("BodyT")

_encoder = msgspec.msgpack.Encoder()
trajectory_body_decoder = msgspec.msgpack.Decoder(TrajectoryBody)
index_body_decoder = msgspec.msgpack.Decoder(IndexBody)
_data_decoder = msgspec.json.Decoder(dict[str, Any])


def encode_body(body: msgspec.Struct) -> bytes:
    """Encode a body.

    Raises:
        InputError: A text holds a lone surrogate.
    """
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError as error:
        raise InputError(f"a record cannot be encoded: one of its texts is not valid Unicode: {error}") from error


def decode_body(decoder: msgspec.msgpack.Decoder[BodyT], frame: Frame) -> BodyT:
    """Decode the body of a verified frame.

    Raises:
        FormatError: It is not msgpack, nested too deeply, or a key is missing or has a wrong type.
    """
    try:
        return decoder.decode(frame.body())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"the body of a record cannot be read: {error}") from error


def spans_of(body: IndexBody) -> tuple[VersionSpan, ...]:
    """The spans as the types of the engine."""
    return tuple(
        [VersionSpan(PolicyVersion(incarnation, version), count) for incarnation, version, count in body.spans]
    )


def encode_data(data: dict[str, Any]) -> str:
    """A prompt's data as a JSON object.

    Raises:
        InputError: It holds something that JSON has no form for, or is nested too deeply.
    """
    try:
        encoded = msgspec.json.encode(data).decode()
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InputError(f"a prompt's data must be made of JSON types: {error}") from error
    if _is_too_deep(data):
        raise InputError(f"a prompt's data is nested more than {MAX_DATA_DEPTH} levels deep; flatten it")
    return encoded


def decode_data(data_json: str) -> dict[str, Any]:
    """A prompt's data from its JSON object.

    Raises:
        FormatError: It is not a JSON object, or is nested more than MAX_DATA_DEPTH levels.
    """
    try:
        data = _data_decoder.decode(data_json)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise FormatError(f"the data of a record is not a JSON object: {error}") from error
    if _is_too_deep(data):
        raise FormatError(f"the data of a record is nested more than {MAX_DATA_DEPTH} levels deep")
    return data


def _is_too_deep(data: dict[str, Any]) -> bool:
    level: list[Any] = [data]
    for _ in range(MAX_DATA_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return False
    return True


def _children(value: Any) -> list[Any]:
    """The containers directly inside a container."""
    items = cast("Iterable[Any]", value.values() if isinstance(value, dict) else value)
    return [item for item in items if isinstance(item, (dict, list, tuple))]
