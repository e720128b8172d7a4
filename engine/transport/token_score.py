"""A token scorer across gRPC: a servicer that exposes any, and a client that is one.

Columns travel in the record format, so that the values that a scorer computed are the bytes that a table stores.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import numpy as np

from headrace.engine.errors import FormatError, InputError
from headrace.engine.interfaces import TokenScorer
from headrace.engine.records import decode_column, encode_column
from headrace.engine.transport.channel import FRAME_BYTES, open_channel
from headrace.engine.transport.server import Service
from headrace.engine.transport.status import error_from_rpc
from headrace.engine.types import TokenScores, TokenSequence
from headrace.v1 import token_score_pb2 as pb
from headrace.v1 import token_score_pb2_grpc as rpc
from headrace.v1 import trajectory_pb2

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["TokenScoreService"].full_name

# What one call may take: a forward pass over a frame of long sequences on a slow device.
SCORE_TIMEOUT_S = 600.0
# A token id takes up to 5 bytes on the wire and its score 4.
_TOKENS_PER_CALL = FRAME_BYTES // 4


def token_score_service(scorer: TokenScorer, *, temperature: float = 1.0) -> Service:
    """What a `GrpcServer` needs to expose a scorer. The caller still owns and closes the scorer.

    Args:
        scorer: Any implementation.
        temperature: What the scorer divides logits by; a request for another temperature is refused, as the protocol
            of a scorer has no place for one.
    """
    servicer = _TokenScoreServicer(scorer, temperature)
    return Service(
        name=SERVICE_NAME,
        add=lambda server: rpc.add_TokenScoreServiceServicer_to_server(servicer, server),
    )


class _TokenScoreServicer(rpc.TokenScoreServiceServicer):
    def __init__(self, scorer: TokenScorer, temperature: float) -> None:
        self._scorer = scorer
        self._temperature = temperature

    async def ScoreTokens(self, request: pb.ScoreTokensRequest, context: "Context") -> pb.ScoreTokensResponse:
        # proto3 tells a missing number from 0 as little as a reader can: both mean "as you are set up".
        if request.temperature and not np.isclose(request.temperature, self._temperature, rtol=1e-5):
            raise InputError(
                f"scores at temperature {request.temperature:g} were asked for; this scorer gives them at "
                f"{self._temperature:g}; configure both alike"
            )
        batch = [_sequence_from_proto(message) for message in request.sequences]
        scores = await self._scorer.score_tokens(batch)
        return pb.ScoreTokensResponse(columns=[_column_to_proto(score) for score in scores])


class RemoteTokenScorer:
    """A `TokenScorer` that lives behind an address.

    Errors arrive as the class that the other side raised; a connection that breaks is an ActorLostError. The channel
    opens at the first call and reconnects by itself.
    """

    def __init__(
        self, address: str, *, temperature: float = 1.0, timeout_s: float = SCORE_TIMEOUT_S, internal: bool = True
    ) -> None:
        """Prepare a client; nothing is sent yet.

        Args:
            address: `grpc://host:port` or `unix:/path`.
            temperature: What logits must be divided by; a scorer that is set up for another refuses.
            timeout_s: For each call, which covers at most about 1 MiB of sequences.
            internal: The scorer is a part of this run, so that proxies of the environment are not asked.
        """
        self._address = address
        self._temperature = temperature
        self._timeout_s = timeout_s
        self._internal = internal
        self._channel: grpc.aio.Channel | None = None

    async def score_tokens(self, batch: Sequence[TokenSequence]) -> list[TokenScores]:
        """One column a sequence, in order, each float32 [T], read-only. Waits for the scorer.

        Large batches travel as several calls, one after the other. Cancelling cancels the call that is under way.

        Raises:
            DeadlineError: A call took longer than `timeout_s`.
            ActorLostError: The connection broke.
            FormatError: The answer is not one valid column a sequence.
            ConfigError: The address is malformed.
        """
        scores: list[TokenScores] = []
        for part in _parts(batch):
            scores += await self._score_part(part)
        return scores

    async def close(self) -> None:
        """Close the connection; the scorer behind it stays. May be called twice."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _score_part(self, part: Sequence[TokenSequence]) -> list[TokenScores]:
        if self._channel is None:
            self._channel = open_channel(self._address, internal=self._internal, setting="the token scorer's address")
        request = pb.ScoreTokensRequest(
            sequences=[_sequence_to_proto(sequence) for sequence in part], temperature=self._temperature
        )
        try:
            response = await rpc.TokenScoreServiceStub(self._channel).ScoreTokens(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"scoring {len(part)} sequences at {self._address}") from error
        if len(response.columns) != len(part):
            raise FormatError(
                f"{len(response.columns)} columns came back from {self._address} for {len(part)} sequences"
            )
        return [_column_from_proto(column, sequence) for column, sequence in zip(response.columns, part, strict=True)]


def _parts(batch: Sequence[TokenSequence]) -> Iterable[Sequence[TokenSequence]]:
    """Cut a batch where the next sequence would pass the tokens of one call; a longer sequence goes alone."""
    start = num_tokens = 0
    for position, sequence in enumerate(batch):
        size = sequence.prompt_token_ids.size + sequence.response_token_ids.size
        if num_tokens and num_tokens + size > _TOKENS_PER_CALL:
            yield batch[start:position]
            start, num_tokens = position, 0
        num_tokens += size
    if start < len(batch):
        yield batch[start:]


def _sequence_to_proto(sequence: TokenSequence) -> pb.TokenSequence:
    return pb.TokenSequence(
        record_id=sequence.record_id,
        prompt_token_ids=sequence.prompt_token_ids.tolist(),
        response_token_ids=sequence.response_token_ids.tolist(),
    )


def _sequence_from_proto(message: pb.TokenSequence) -> TokenSequence:
    return TokenSequence(
        record_id=message.record_id,
        prompt_token_ids=np.array(message.prompt_token_ids, np.int32),
        response_token_ids=np.array(message.response_token_ids, np.int32),
    )


def _column_to_proto(score: TokenScores) -> trajectory_pb2.EncodedColumn:
    return trajectory_pb2.EncodedColumn(
        record_id=score.record_id, name=score.column, data=encode_column(score.column, score.values)
    )


def _column_from_proto(message: trajectory_pb2.EncodedColumn, sequence: TokenSequence) -> TokenScores:
    """The scores of one sequence.

    Raises:
        FormatError: They belong to another record, or are not float32 [T].
    """
    name, values = decode_column(message.data)
    if message.record_id != sequence.record_id or message.name != name:
        raise FormatError(
            f"for {sequence.record_id!r} the column {message.name!r} of {message.record_id!r} came back, "
            f"with {name!r} inside"
        )
    if values.dtype != np.float32 or values.shape != sequence.response_token_ids.shape:
        raise FormatError(
            f"the scores of {sequence.record_id!r} are {values.dtype} {list(values.shape)}; "
            f"float32 {list(sequence.response_token_ids.shape)} was expected"
        )
    return TokenScores(record_id=message.record_id, column=name, values=values)
