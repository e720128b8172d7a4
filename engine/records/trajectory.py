"""Trajectories as bytes: the one encoding that a gRPC frame, shared memory and a disk segment all hold.

Readers of one major version ignore body keys and arrays that they do not know, so fields can be added without a new
version. Received bytes are never executed and never believed: see `headrace.engine.records.frame`.
"""

from headrace.engine.errors import FormatError, InputError, SchemaError
from headrace.engine.records.body import (
    TrajectoryBody,
    decode_body,
    decode_data,
    encode_body,
    encode_data,
    spans_of,
    trajectory_body_decoder,
)
from headrace.engine.records.frame import KIND_TRAJECTORY, Buffer, array_entry, locate, open_frame, pack, view
from headrace.engine.records.invariants import count_loss_tokens, find_dtype_problem, find_problem
from headrace.engine.types import Trajectory

_ARRAY_NAMES = ("prompt_token_ids", "response_token_ids", "logprobs", "loss_mask")


def encode_trajectory(t: Trajectory) -> bytes:
    """Encode one record. Does not wait; copies each array once.

    `t.data` holds JSON types only: tuples come back as lists, and a NaN comes back as None.

    Raises:
        SchemaError: An array's dtype or number of dimensions is not the one that `Trajectory` declares.
        InputError: The record breaks an invariant (mask, spans, lengths, finite log-probabilities), or a text or its
            data cannot be encoded.
    """
    problem = find_dtype_problem(t)
    if problem is not None:
        raise SchemaError(f"record {t.record_id!r} cannot be encoded: {problem}")
    num_loss_tokens = count_loss_tokens(t)
    problem = find_problem(t, num_loss_tokens)
    if problem is not None:
        raise InputError(f"record {t.record_id!r} cannot be encoded: {problem}")
    arrays = (t.prompt_token_ids, t.response_token_ids, t.logprobs, t.loss_mask)
    body = TrajectoryBody(
        record_id=t.record_id,
        group_id=t.group_id,
        prompt_id=t.prompt_id,
        sample_index=t.sample_index,
        group_size=t.group_size,
        attempt=t.attempt,
        num_loss_tokens=num_loss_tokens,
        spans=tuple([(version.incarnation, version.version, count) for version, count in t.spans]),
        arrays=(
            array_entry("prompt_token_ids", t.prompt_token_ids),
            array_entry("response_token_ids", t.response_token_ids),
            array_entry("logprobs", t.logprobs),
            array_entry("loss_mask", t.loss_mask),
        ),
        finish_reason=t.finish_reason,
        temperature=t.temperature,
        prompt_text=t.prompt_text,
        response_text=t.response_text,
        data_json=encode_data(t.data) if t.data else "{}",
        started_at_s=t.started_at_s,
        finished_at_s=t.finished_at_s,
    )
    return pack(KIND_TRAJECTORY, encode_body(body), arrays)


def decode_trajectory(data: Buffer, *, copy: bool = False) -> Trajectory:
    """Decode one record. Does not wait; reads every byte once for the checksum.

    Args:
        data: Exactly one encoded record. Without `copy`, `bytes` or another read-only buffer: the arrays of the result
            are read-only views of it and keep it alive, so whoever passes a read-only view of memory that he owns
            (shared memory, a mapped file) promises not to reuse it while the trajectory or one of its arrays lives.
        copy: Copy `data` once and view the copy. Needed for a writable buffer (bytearray, a receive buffer).

    Raises:
        InputError: `data` is writable and `copy` is false.
        FormatError: The bytes are not one whole, undamaged record of this major version, or it breaks an invariant.
    """
    frame = open_frame(data, KIND_TRAJECTORY, copy=copy)
    body = decode_body(trajectory_body_decoder, frame)
    places = locate(frame, body.arrays)
    try:
        prompt, response, logprobs, mask = (view(frame, *places[name]) for name in _ARRAY_NAMES)
    except KeyError as error:
        raise FormatError(f"record {body.record_id[:80]!r} has no array {error}") from error
    t = Trajectory(
        record_id=body.record_id,
        group_id=body.group_id,
        prompt_id=body.prompt_id,
        sample_index=body.sample_index,
        group_size=body.group_size,
        attempt=body.attempt,
        prompt_token_ids=prompt,
        response_token_ids=response,
        logprobs=logprobs,
        loss_mask=mask,
        spans=spans_of(body),
        finish_reason=body.finish_reason,
        temperature=body.temperature,
        prompt_text=body.prompt_text,
        response_text=body.response_text,
        data=decode_data(body.data_json) if body.data_json != "{}" else {},
        started_at_s=body.started_at_s,
        finished_at_s=body.finished_at_s,
    )
    problem = find_dtype_problem(t) or find_problem(t, body.num_loss_tokens)
    if problem is None and (found := count_loss_tokens(t)) != body.num_loss_tokens:
        problem = f"it announces {body.num_loss_tokens} loss tokens; its mask has {found}"
    if problem is not None:
        raise FormatError(f"record {t.record_id[:80]!r} is not valid: {problem}")
    return t
