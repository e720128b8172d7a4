"""The index's view of a record, from the trajectory in memory or from its bytes."""

from collections.abc import Sequence

from headrace.engine.errors import FormatError
from headrace.engine.records.body import decode_body, index_body_decoder, spans_of
from headrace.engine.records.frame import KIND_TRAJECTORY, Buffer, check_shape, locate, open_frame
from headrace.engine.records.invariants import count_loss_tokens
from headrace.engine.types import Trajectory, VersionSpan
from headrace.engine.types.records import RecordHeader


def header_of(t: Trajectory) -> RecordHeader:
    """The header of a trajectory in memory; equal to `peek_header` of its encoding."""
    return RecordHeader(
        record_id=t.record_id,
        group_id=t.group_id,
        sample_index=t.sample_index,
        attempt=t.attempt,
        group_size=t.group_size,
        oldest_version=t.oldest_version,
        newest_version=t.newest_version,
        num_prompt_tokens=t.prompt_token_ids.size,
        num_response_tokens=t.response_token_ids.size,
        num_loss_tokens=count_loss_tokens(t),
        mean_version=t.mean_version,
    )


def peek_header(data: Buffer) -> RecordHeader:
    """The header of an encoded record, checksum verified, without decoding texts, data or arrays.

    Nothing of the result refers to `data`, so a read-only view of a buffer that is reused later may be given.

    Raises:
        InputError: `data` is writable; pass `memoryview(data).toreadonly()`.
        FormatError: See `decode_trajectory`; what the arrays hold is not looked at.
    """
    frame = open_frame(data, KIND_TRAJECTORY, copy=False)
    body = decode_body(index_body_decoder, frame)
    places = locate(frame, body.arrays)
    lengths: list[int] = []
    for name in ("prompt_token_ids", "response_token_ids"):
        entry = places[name][0] if name in places else None
        if entry is None or entry.dtype != "int32" or len(entry.shape) != 1:
            raise FormatError(f"record {body.record_id[:80]!r} has no row {name!r} of int32")
        check_shape(entry)
        lengths.append(entry.shape[0])
    num_prompt, num_response = lengths
    spans = spans_of(body)
    if not spans or sum(span.num_tokens for span in spans) != num_response or body.num_loss_tokens > num_response:
        raise FormatError(
            f"record {body.record_id[:80]!r} has {num_response} response tokens; its spans or loss tokens do not agree"
        )
    return RecordHeader(
        record_id=body.record_id,
        group_id=body.group_id,
        sample_index=body.sample_index,
        attempt=body.attempt,
        group_size=body.group_size,
        oldest_version=min(span.version for span in spans),
        newest_version=max(span.version for span in spans),
        num_prompt_tokens=num_prompt,
        num_response_tokens=num_response,
        num_loss_tokens=body.num_loss_tokens,
        mean_version=_mean_version(spans, num_response),
    )


def _mean_version(spans: Sequence[VersionSpan], num_tokens: int) -> float:
    if num_tokens == 0:
        return float(min(span.version for span in spans).version)
    return sum(span.version.version * span.num_tokens for span in spans) / num_tokens
