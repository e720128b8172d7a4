"""The checks of rewards and token scorers pass what is right and name what is wrong."""

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from headrace.engine.testing import check_reward, check_token_scorer
from headrace.engine.types import RewardOutcome, RewardSample, RewardStatus, TokenScores, TokenSequence


class ExactAnswer:
    """1 for the reference answer, 0 for another, ABSTAIN for nothing."""

    async def score(self, batch: Sequence[RewardSample]) -> list[RewardOutcome]:
        await asyncio.sleep(0)
        return [self._judge(sample) for sample in batch]

    def _judge(self, sample: RewardSample) -> RewardOutcome:
        if not sample.response_text:
            return RewardOutcome(sample_id=sample.sample_id, status=RewardStatus.ABSTAIN, message="nothing to judge")
        value = float(sample.response_text == sample.data["answer"])
        return RewardOutcome(sample_id=sample.sample_id, status=RewardStatus.OK, value=value)

    async def close(self) -> None:
        pass


class TokenParity:
    """-1 for odd tokens, -2 for even ones."""

    async def score_tokens(self, batch: Sequence[TokenSequence]) -> list[TokenScores]:
        return [self._score(sequence) for sequence in batch]

    def _score(self, sequence: TokenSequence) -> TokenScores:
        values = np.where(sequence.response_token_ids % 2 == 1, np.float32(-1), np.float32(-2))
        return TokenScores(record_id=sequence.record_id, column="reference_logprobs", values=values)

    async def close(self) -> None:
        pass


async def test_a_right_reward_and_a_right_scorer_conform() -> None:
    await check_reward(ExactAnswer)
    await check_token_scorer(TokenParity)


class _Reorders(ExactAnswer):
    async def score(self, batch: Sequence[RewardSample]) -> list[RewardOutcome]:
        return sorted(await super().score(batch), key=lambda outcome: outcome.value)


class _SilentZero(ExactAnswer):
    def _judge(self, sample: RewardSample) -> RewardOutcome:
        return msgspec.structs.replace(super()._judge(sample), message="")


class _NotFinite(ExactAnswer):
    def _judge(self, sample: RewardSample) -> RewardOutcome:
        return RewardOutcome(sample_id=sample.sample_id, status=RewardStatus.OK, value=float("nan"))


class _ForgetsOne(ExactAnswer):
    async def score(self, batch: Sequence[RewardSample]) -> list[RewardOutcome]:
        return (await super().score(batch))[:2]


class _Counts(ExactAnswer):
    seen = 0

    def _judge(self, sample: RewardSample) -> RewardOutcome:
        self.seen += 1
        return RewardOutcome(sample_id=sample.sample_id, status=RewardStatus.OK, value=float(self.seen))


class _ClosesOnce(ExactAnswer):
    closed = False

    async def close(self) -> None:
        if self.closed:
            await asyncio.Event().wait()
        self.closed = True


class _BreaksOnCancel(ExactAnswer):
    broken = False

    async def score(self, batch: Sequence[RewardSample]) -> list[RewardOutcome]:
        if self.broken:
            await asyncio.Event().wait()
        try:
            return await super().score(batch)
        except asyncio.CancelledError:
            self.broken = True
            raise


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (_Reorders, "one outcome a sample, in order"),
        (_SilentZero, "message must say why"),
        (_NotFinite, "finite with status OK"),
        (_ForgetsOne, "one outcome a sample"),
        (_Counts, "twice must give an equal outcome"),
        (_ClosesOnce, "second close"),
        (_BreaksOnCancel, "after another was cancelled"),
    ],
)
async def test_the_check_finds_a_broken_reward(broken: type[ExactAnswer], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        await check_reward(broken, timeout_s=0.2)


class _Float64(TokenParity):
    def _score(self, sequence: TokenSequence) -> TokenScores:
        score = super()._score(sequence)
        return msgspec.structs.replace(score, values=score.values.astype(np.float64))


class _ScoresThePrompt(TokenParity):
    def _score(self, sequence: TokenSequence) -> TokenScores:
        both = np.concatenate([sequence.prompt_token_ids, sequence.response_token_ids])
        return super()._score(msgspec.structs.replace(sequence, response_token_ids=both))


class _LeaksPadding(TokenParity):
    async def score_tokens(self, batch: Sequence[TokenSequence]) -> list[TokenScores]:
        scores = await super().score_tokens(batch)
        return [msgspec.structs.replace(s, values=s.values - np.float32(0.01 * len(batch))) for s in scores]


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [(_Float64, "must be float32"), (_ScoresThePrompt, r"must have shape \[5\]"), (_LeaksPadding, "companions")],
)
async def test_the_check_finds_a_broken_scorer(broken: type[TokenParity], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        await check_token_scorer(broken)
