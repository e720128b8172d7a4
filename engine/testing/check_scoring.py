"""Conformance of a `Reward` and of a `TokenScorer`."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from headrace.engine.interfaces import Reward, TokenScorer
from headrace.engine.testing.expect import expect, within
from headrace.engine.types import RewardOutcome, RewardSample, RewardStatus, TokenScores, TokenSequence

REWARD_SAMPLES = (
    RewardSample(sample_id="g/0/0", group_id="g", prompt_text="2 + 2 =", response_text="4", data={"answer": "4"}),
    RewardSample(sample_id="g/1/0", group_id="g", prompt_text="2 + 2 =", response_text="five", data={"answer": "4"}),
    RewardSample(sample_id="g/2/0", group_id="g", prompt_text="2 + 2 =", response_text="", data={"answer": "4"}),
)

TOKEN_SEQUENCES = tuple(
    TokenSequence(
        record_id=f"g/{index}/0",
        prompt_token_ids=np.arange(1, 1 + num_prompt, dtype=np.int32),
        response_token_ids=np.arange(2, 2 + num_response, dtype=np.int32),
    )
    for index, (num_prompt, num_response) in enumerate([(3, 5), (1, 1), (4, 2)])
)


async def check_reward(
    factory: Callable[[], Reward], samples: Sequence[RewardSample] = REWARD_SAMPLES, *, timeout_s: float = 60.0
) -> None:
    """Run every rule of `Reward` against one scorer. Waits as long as it scores; cancelling closes it.

    Args:
        factory: Makes a reward that is ready; called once.
        samples: At least two, with different ids, that the scorer can judge.
        timeout_s: For each single wait.

    Raises:
        AssertionError: With one sentence on the first rule that is broken.
    """
    reward = factory()
    try:
        outcomes = await within(reward.score(samples), timeout_s, "score() must return")
        _check_outcomes(samples, outcomes)
        again = await within(reward.score(samples[::-1]), timeout_s, "score() must return")
        _check_outcomes(samples[::-1], again)
        same = [(a.status, a.value) for a in outcomes] == [(b.status, b.value) for b in again[::-1]]
        expect(same, "scoring the same sample twice must give an equal outcome")
        empty = await within(reward.score([]), timeout_s, "score([]) must return")
        expect(empty == [], "an empty batch has no outcomes")
        together = asyncio.gather(*(reward.score([sample]) for sample in samples))
        for sample, single in zip(samples, await within(together, timeout_s, "batches side by side"), strict=True):
            _check_outcomes([sample], single)
        cancelled = asyncio.ensure_future(reward.score(samples))
        await asyncio.sleep(0)
        cancelled.cancel()
        await within(asyncio.wait({cancelled}), timeout_s, "a cancelled score() must end")
        after = await within(reward.score(samples), timeout_s, "score() must return after another was cancelled")
        _check_outcomes(samples, after)
    finally:
        await within(reward.close(), timeout_s, "close() must return")
    await within(reward.close(), timeout_s, "a second close() must return")


def _check_outcomes(samples: Sequence[RewardSample], outcomes: Sequence[RewardOutcome]) -> None:
    ids = [sample.sample_id for sample in samples]
    expect([o.sample_id for o in outcomes] == ids, "score() must give one outcome a sample, in order, with its id")
    for outcome in outcomes:
        expect(type(outcome.value) is float, f"the value of {outcome.sample_id} must be a float")
        if outcome.status is RewardStatus.OK:
            expect(math.isfinite(outcome.value), f"the value of {outcome.sample_id} must be finite with status OK")
        else:
            expect(bool(outcome.message), f"the outcome of {outcome.sample_id} is not OK, so its message must say why")
            expect(
                outcome.value == 0.0, f"the outcome of {outcome.sample_id} is not OK, so its value must be left at 0"
            )
        named = all(math.isfinite(value) for value in outcome.metrics.values())
        expect(named, f"the metrics of {outcome.sample_id} must be finite")


async def check_token_scorer(
    factory: Callable[[], TokenScorer],
    sequences: Sequence[TokenSequence] = TOKEN_SEQUENCES,
    *,
    tolerance: float = 1e-4,
    timeout_s: float = 60.0,
) -> None:
    """Run every rule of `TokenScorer` against one scorer. Waits as long as it scores; cancelling closes it.

    Args:
        factory: Makes a scorer that is ready; called once.
        sequences: At least two, of different lengths, with ids that the model knows.
        tolerance: How far a score may move with the companions in its batch.
        timeout_s: For each single wait.

    Raises:
        AssertionError: With one sentence on the first rule that is broken.
    """
    scorer = factory()
    try:
        scores = await within(scorer.score_tokens(sequences), timeout_s, "score_tokens() must return")
        _check_scores(sequences, scores)
        empty = await within(scorer.score_tokens([]), timeout_s, "score_tokens([]) must return")
        expect(empty == [], "an empty batch has no scores")
        singles: list[TokenScores] = []
        for sequence in sequences:
            single = await within(scorer.score_tokens([sequence]), timeout_s, "score_tokens() must return")
            _check_scores([sequence], single)
            singles += single
        for one, other in zip(scores, singles, strict=True):
            close = np.allclose(one.values, other.values, rtol=0, atol=tolerance)
            expect(close, f"the scores of {one.record_id} must not depend on its companions in the batch")
        reverse = await within(scorer.score_tokens(sequences[::-1]), timeout_s, "score_tokens() must return")
        _check_scores(sequences[::-1], reverse)
    finally:
        await within(scorer.close(), timeout_s, "close() must return")
    await within(scorer.close(), timeout_s, "a second close() must return")


def _check_scores(sequences: Sequence[TokenSequence], scores: Sequence[TokenScores]) -> None:
    ids = [sequence.record_id for sequence in sequences]
    expect(
        [s.record_id for s in scores] == ids, "score_tokens() must give one column a sequence, in order, with its id"
    )
    expect(len({s.column for s in scores}) == 1, "all scores of one scorer must name the same column")
    expect(bool(scores[0].column), "scores must name their column")
    for sequence, score in zip(sequences, scores, strict=True):
        values = cast("object", score.values)
        expect(isinstance(values, np.ndarray), f"the scores of {score.record_id} must be a numpy array")
        expect(score.values.dtype == np.float32, f"the scores of {score.record_id} must be float32")
        shape = sequence.response_token_ids.shape
        expect(score.values.shape == shape, f"the scores of {score.record_id} must have shape {list(shape)}: [T]")
        expect(bool(np.isfinite(score.values).all()), f"the scores of {score.record_id} must be finite")
