"""Conversions between the wire's reward messages and our own types, and the check of a server's reply."""

import math
from collections.abc import Sequence

from headrace.engine.errors import FormatError
from headrace.engine.transport.convert import json_from_text, json_to_text
from headrace.engine.types import FinishReason, RewardOutcome, RewardSample, RewardStatus
from headrace.v1 import reward_pb2 as pb
from headrace.v1 import trajectory_pb2

_MAX_MESSAGE_CHARS = 2000


def sample_to_proto(sample: RewardSample) -> pb.RewardSample:
    return pb.RewardSample(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        prompt_text=encodable(sample.prompt_text),
        response_text=encodable(sample.response_text),
        prompt_token_ids=sample.prompt_token_ids,
        response_token_ids=sample.response_token_ids,
        finish_reason=trajectory_pb2.FinishReason.ValueType(int(sample.finish_reason)),
        data_json=json_to_text(sample.data),
    )


def sample_from_proto(message: pb.RewardSample) -> RewardSample:
    """The sample behind a message; a finish reason of a later version is read as NONE.

    Raises:
        FormatError: Its data is not a JSON object.
    """
    known = message.finish_reason in {int(reason) for reason in FinishReason}
    return RewardSample(
        sample_id=message.sample_id,
        group_id=message.group_id,
        prompt_text=message.prompt_text,
        response_text=message.response_text,
        prompt_token_ids=tuple(message.prompt_token_ids),
        response_token_ids=tuple(message.response_token_ids),
        finish_reason=FinishReason(message.finish_reason) if known else FinishReason.NONE,
        data=json_from_text(message.data_json, f"the data of sample {message.sample_id!r}"),
    )


def outcome_to_proto(outcome: RewardOutcome) -> pb.RewardOutcome:
    return pb.RewardOutcome(
        sample_id=outcome.sample_id,
        outcome=pb.Outcome.ValueType(int(outcome.status)),
        value=outcome.value,
        metrics=outcome.metrics,
        message=encodable(outcome.message),
    )


def outcome_from_proto(message: pb.RewardOutcome, sample_id: str, server: str) -> RewardOutcome:
    """The outcome that a server gave for the sample it was asked about.

    What breaks the contract (another id, no status, a value that is not finite) becomes an ERROR outcome that names the
    server; metrics that are not finite are left out.
    """
    if message.sample_id != sample_id:
        given = f"sample_id {message.sample_id!r}" if message.sample_id else "no sample_id"
        return failed(sample_id, f"{server} answered with {given} where {sample_id!r} was asked; keep ids and order")
    if message.outcome not in {int(status) for status in RewardStatus}:
        return failed(
            sample_id,
            f"{server} answered sample {sample_id!r} with outcome {message.outcome}; "
            "allowed are OK, TIMEOUT, ERROR and ABSTAIN",
        )
    status = RewardStatus(message.outcome)
    if status is RewardStatus.OK and not math.isfinite(message.value):
        return failed(
            sample_id, f"{server} answered sample {sample_id!r} with the value {message.value}; a reward must be finite"
        )
    return RewardOutcome(
        sample_id=sample_id,
        status=status,
        value=message.value if status is RewardStatus.OK else 0.0,
        metrics={key: number for key, number in message.metrics.items() if math.isfinite(number)},
        message=message.message[:_MAX_MESSAGE_CHARS],
    )


def outcomes_from_reply(samples: Sequence[RewardSample], reply: pb.ScoreResponse, server: str) -> list[RewardOutcome]:
    """One outcome a sample, in order, from whatever a server replied. Pure; never raises.

    With the wrong number of outcomes nothing says which is whose: every sample of the call is an ERROR then.
    """
    if len(reply.outcomes) != len(samples):
        numbers = f"{len(reply.outcomes)} outcomes for {len(samples)} samples"
        return [
            failed(sample.sample_id, f"{server} answered {numbers} (sample {sample.sample_id!r}); give one a sample")
            for sample in samples
        ]
    pairs = zip(samples, reply.outcomes, strict=True)
    return [outcome_from_proto(message, sample.sample_id, server) for sample, message in pairs]


def failed(sample_id: str, message: str) -> RewardOutcome:
    """An ERROR outcome."""
    return RewardOutcome(sample_id=sample_id, status=RewardStatus.ERROR, message=message[:_MAX_MESSAGE_CHARS])


def timed_out(sample_id: str, message: str) -> RewardOutcome:
    """A TIMEOUT outcome."""
    return RewardOutcome(sample_id=sample_id, status=RewardStatus.TIMEOUT, message=message[:_MAX_MESSAGE_CHARS])


def read_samples(messages: Sequence[pb.RewardSample]) -> list[RewardSample | RewardOutcome]:
    """The samples of a request; in the place of an unreadable one its ERROR outcome."""
    read: list[RewardSample | RewardOutcome] = []
    for message in messages:
        try:
            read.append(sample_from_proto(message))
        except FormatError as error:  # recorded: the outcome carries it
            read.append(failed(message.sample_id, str(error)))
    return read


def encodable(text: str) -> str:
    """The text with lone surrogates replaced, for a protobuf string is UTF-8 and a detokenizer may cut a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text
