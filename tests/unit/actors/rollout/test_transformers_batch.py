"""The decode loop: padding, temperature, seeds, rows that join and leave."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.actors.rollout.transformers_batch import DecodeBatch, Row, draw
from headrace.actors.tiny import TinyKind, build_tiny_model
from headrace.engine.types import FinishReason, GenerateRequest, SamplingParams


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower on many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


NO_END: frozenset[int] = frozenset()


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind: TinyKind = request.param
    folder = build_tiny_model(tmp_path_factory.mktemp(kind), kind)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def row(prompt: tuple[int, ...], **sampling: Any) -> Row:
    params = SamplingParams(**({"max_tokens": 8, "seed": 0} | sampling))
    generator = torch.Generator().manual_seed(params.seed or 0)
    return Row(request=GenerateRequest(request_id="r", token_ids=prompt, sampling=params), generator=generator)


def run(model: Any, *schedule: list[Row], end_ids: frozenset[int] = NO_END) -> dict[int, list[float]]:
    """Admit each list before another iteration, run to the end; log-probabilities by row."""
    batch = DecodeBatch(model, end_ids)
    found: dict[int, list[float]] = {}
    waiting = list(schedule)
    while waiting or batch.rows:
        sampled = batch.step() if batch.rows else []
        if waiting and (joining := waiting.pop(0)):
            sampled += batch.admit(joining)
        for item in sampled:
            found.setdefault(id(item.row), []).append(item.logprob)
    return found


def forward(model: Any, one: Row, temperature: float) -> np.ndarray:
    ids = torch.tensor([[*one.request.token_ids, *one.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(one.request.token_ids) - 1 : -1]
    scores = torch.log_softmax(logits / temperature, -1)
    return scores[torch.arange(len(one.token_ids)), torch.tensor(one.token_ids)].numpy()


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_left_padding_rows_of_many_lengths_score_as_if_they_were_alone(model: Any, temperature: float) -> None:
    rows = [row(tuple(range(11, 11 + length)), temperature=temperature, seed=length) for length in (3, 1, 5)]
    late = [row((4, 5), temperature=temperature, max_tokens=3), row(tuple(range(40)), temperature=temperature)]
    found = run(model, rows, [], late)
    for one in rows + late:
        np.testing.assert_allclose(found[id(one)], forward(model, one, temperature), atol=1e-4)


def test_a_seed_gives_the_same_sample_whatever_runs_beside_it(model: Any) -> None:
    alone, beside = row((1, 2, 3), seed=5), row((1, 2, 3), seed=5)
    run(model, [alone])
    run(model, [row((9,) * 20, seed=1)], [], [beside, row((3,), seed=2)])
    assert beside.token_ids == alone.token_ids


def test_a_zero_temperature_is_greedy_and_scores_at_temperature_one(model: Any) -> None:
    one = row((1, 2, 3), temperature=0.0)
    found = run(model, [one])
    ids = torch.tensor([[1, 2, 3, *one.token_ids]])
    with torch.no_grad():
        assert model(ids).logits[0, 2:-1].argmax(-1).tolist() == one.token_ids
    np.testing.assert_allclose(found[id(one)], forward(model, one, 1.0), atol=1e-4)


def test_appended_eos_stop_tokens_stay_in_the_ids(model: Any) -> None:
    free = row((1, 2, 3), temperature=0.0)
    run(model, [free])
    stop = free.token_ids[4]
    first = free.token_ids[: free.token_ids.index(stop) + 1]
    by_request = row((1, 2, 3), temperature=0.0, stop_token_ids=(stop,))
    by_model = row((1, 2, 3), temperature=0.0)
    run(model, [by_request])
    run(model, [by_model], end_ids=frozenset({stop}))
    assert by_request.token_ids == by_model.token_ids == first


def test_stop_strings_end_a_row_and_stay_in_the_ids(model: Any) -> None:
    one = row((1, 2, 3), temperature=0.0, stop=("|",), max_tokens=50)
    one.decode = lambda ids: "|" if len(one.token_ids) == 6 else "x" * len(ids)
    batch = DecodeBatch(model, NO_END)
    reasons = [item.finish_reason for item in batch.admit([one])]
    while batch.rows:
        reasons += [item.finish_reason for item in batch.step()]
    assert len(one.token_ids) == 6
    assert reasons == [FinishReason.NONE] * 5 + [FinishReason.STOP]


def test_temperature_divides_the_logits_not_the_log_probability() -> None:
    one = row((1,), temperature=0.5)
    logits = torch.tensor([2.0, 1.0, 0.0])
    drawn = dict(draw(logits, one) for _ in range(200))
    assert drawn[1] == pytest.approx(-2.142932, abs=1e-5)


def test_draws_follow_the_distribution() -> None:
    one = row((1,), temperature=2.0)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    counts = np.bincount([draw(logits, one)[0] for _ in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(counts, torch.softmax(logits / 2, -1).numpy(), atol=0.03)


@pytest.mark.parametrize(("limits", "kept"), [({"top_k": 2}, 2), ({"top_p": 0.5}, 1), ({"top_p": 0.8}, 2)])
def test_top_k_and_top_p_scores_are_those_of_the_cut_distribution(limits: dict[str, Any], kept: int) -> None:
    one = row((1,), **limits)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    drawn = dict(draw(logits, one) for _ in range(300))
    assert set(drawn) == set(range(kept))
    assert sum(math.exp(value) for value in drawn.values()) == pytest.approx(1.0, abs=1e-5)
