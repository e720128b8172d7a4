"""A token scorer behind gRPC is a token scorer; whatever is wrong arrives as a typed error."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
import numpy as np
import pytest

from headrace.engine.errors import ActorLostError, ConfigError, DeadlineError, FormatError, InputError, RunError
from headrace.engine.records import encode_column
from headrace.engine.testing import check_token_scorer
from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.server import Service, serving
from headrace.engine.transport.token_score import RemoteTokenScorer, token_score_service
from headrace.engine.types import TokenScores, TokenSequence
from headrace.v1 import token_score_pb2 as pb
from headrace.v1 import token_score_pb2_grpc as rpc
from headrace.v1 import trajectory_pb2


class Halves:
    """Half of each token id, negative; counts its batches."""

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []
        self.entered = asyncio.Event()
        self.hold = False
        self.cancelled = asyncio.Event()

    async def score_tokens(self, batch: Sequence[TokenSequence]) -> list[TokenScores]:
        self.batch_sizes.append(len(batch))
        self.entered.set()
        if self.hold:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return [
            TokenScores(
                record_id=s.record_id,
                column="reference_logprobs",
                values=(s.response_token_ids / -2).astype(np.float32),
            )
            for s in batch
        ]

    async def close(self) -> None:
        pass


class Failing(Halves):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def score_tokens(self, batch: Sequence[TokenSequence]) -> list[TokenScores]:
        raise self.error


def _sequence(name: str = "g/0/0", num_response: int = 3) -> TokenSequence:
    return TokenSequence(
        record_id=name,
        prompt_token_ids=np.array([5], np.int32),
        response_token_ids=np.arange(num_response, dtype=np.int32),
    )


def _socket(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/s"


async def test_a_remote_scorer_conforms_and_gives_the_very_values(tmp_path: Path) -> None:
    async with serving([token_score_service(Halves())], _socket(tmp_path)) as server:
        await check_token_scorer(lambda: RemoteTokenScorer(server.address))
        remote = RemoteTokenScorer(server.address)
        sequences = [_sequence(), _sequence("empty", 0)]
        scores = await remote.score_tokens(sequences)
        for score, expected in zip(scores, await Halves().score_tokens(sequences), strict=True):
            assert (score.record_id, score.column) == (expected.record_id, expected.column)
            np.testing.assert_array_equal(score.values, expected.values)
        await remote.close()


async def test_a_large_batch_travels_in_several_calls_and_comes_back_in_order(tmp_path: Path) -> None:
    scorer = Halves()
    sequences = [_sequence(str(index), 100_000) for index in range(5)]
    async with serving([token_score_service(scorer)], _socket(tmp_path)) as server:
        remote = RemoteTokenScorer(server.address)
        scores = await remote.score_tokens(sequences)
        await remote.close()
    assert scorer.batch_sizes == [2, 2, 1]
    assert [score.record_id for score in scores] == ["0", "1", "2", "3", "4"]


async def test_another_temperature_is_refused(tmp_path: Path) -> None:
    async with serving([token_score_service(Halves(), temperature=0.7)], _socket(tmp_path)) as server:
        same, other = RemoteTokenScorer(server.address, temperature=0.7), RemoteTokenScorer(server.address)
        await same.score_tokens([_sequence()])
        with pytest.raises(InputError, match=r"temperature 1 were asked for; this scorer gives them at 0\.7"):
            await other.score_tokens([_sequence()])
        await same.close()
        await other.close()


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (InputError("token 9 is not in the vocabulary"), InputError, "token 9"),
        (KeyError("bug"), RunError, "KeyError"),
    ],
)
async def test_an_error_of_the_scorer_arrives_as_itself(
    tmp_path: Path, error: Exception, kind: type[Exception], text: str
) -> None:
    async with serving([token_score_service(Failing(error))], _socket(tmp_path)) as server:
        remote = RemoteTokenScorer(server.address)
        with pytest.raises(kind, match=text):
            await remote.score_tokens([_sequence()])
        await remote.close()


async def test_cancelling_the_caller_cancels_the_scorer_and_leaves_the_client_usable(tmp_path: Path) -> None:
    scorer = Halves()
    scorer.hold = True
    async with serving([token_score_service(scorer)], _socket(tmp_path)) as server:
        remote = RemoteTokenScorer(server.address)
        scoring = asyncio.create_task(remote.score_tokens([_sequence()]))
        await scorer.entered.wait()
        scoring.cancel()
        await asyncio.wait_for(scorer.cancelled.wait(), 5)
        scorer.hold = False
        assert len(await remote.score_tokens([_sequence()])) == 1
        await remote.close()


async def test_a_slow_scorer_is_a_deadline_error(tmp_path: Path) -> None:
    scorer = Halves()
    scorer.hold = True
    async with serving([token_score_service(scorer)], _socket(tmp_path)) as server:
        remote = RemoteTokenScorer(server.address, timeout_s=0.05)
        with pytest.raises(DeadlineError, match="scoring 1 sequences"):
            await remote.score_tokens([_sequence()])
        await remote.close()


async def test_a_scorer_that_is_away_is_a_lost_actor(tmp_path: Path) -> None:
    remote = RemoteTokenScorer(_socket(tmp_path))
    with pytest.raises(ActorLostError, match="not reachable"):
        await remote.score_tokens([_sequence()])
    await remote.close()
    await remote.close()
    with pytest.raises(ConfigError, match="token scorer's address"):
        await RemoteTokenScorer("http://x").score_tokens([_sequence()])


class Liar(rpc.TokenScoreServiceServicer):
    """Answers with a fixed response, as a foreign server may."""

    def __init__(self, response: pb.ScoreTokensResponse) -> None:
        self.response = response

    async def ScoreTokens(
        self, request: pb.ScoreTokensRequest, context: "grpc.aio.ServicerContext[pb.ScoreTokensRequest, object]"
    ) -> pb.ScoreTokensResponse:
        return self.response


def _column(record_id: str = "g/0/0", name: str = "values", data: bytes = b"") -> trajectory_pb2.EncodedColumn:
    good = encode_column("values", np.zeros(3, np.float32))
    return trajectory_pb2.EncodedColumn(record_id=record_id, name=name, data=data or good)


@pytest.mark.parametrize(
    "columns",
    [
        [],
        [_column(), _column()],
        [_column(record_id="another")],
        [_column(name="reward")],
        [_column(data=b"\x80\x04K\x01.")],
        [_column(data=encode_column("values", np.zeros(4, np.float32)))],
        [_column(data=encode_column("values", np.zeros(3, np.float64)))],
        [_column(data=encode_column("values", np.zeros(3, np.float32))[:-1])],
    ],
)
async def test_an_answer_that_does_not_fit_is_a_format_error(
    tmp_path: Path, columns: list[trajectory_pb2.EncodedColumn]
) -> None:
    liar = Liar(pb.ScoreTokensResponse(columns=columns))
    service = Service(
        name="headrace.v1.TokenScoreService", add=lambda s: rpc.add_TokenScoreServiceServicer_to_server(liar, s)
    )
    async with serving([service], _socket(tmp_path)) as server:
        remote = RemoteTokenScorer(server.address)
        with pytest.raises(FormatError):
            await remote.score_tokens([_sequence()])
        await remote.close()


async def test_a_request_without_a_temperature_is_answered(tmp_path: Path) -> None:
    request = pb.ScoreTokensRequest(sequences=[pb.TokenSequence(record_id="r", response_token_ids=[4])])
    async with (
        serving([token_score_service(Halves(), temperature=0.7)], _socket(tmp_path)) as server,
        open_channel(server.address) as channel,
    ):
        response = await rpc.TokenScoreServiceStub(channel).ScoreTokens(request)
    assert [column.record_id for column in response.columns] == ["r"]
