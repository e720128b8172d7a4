"""A policy that is a table, the samples it draws, and how they are packed; loaded by conftest.py.

Four prompts, eight tokens, responses of one to three tokens (token 0 ends one). Each prompt has one right answer, and
an answer earns the share of its places that are right. The junk below stands where no loss may look: prompt tokens
carry scores of a parameter of their own, which must never get a gradient, and columns that are not finite.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import log_softmax

from headrace.engine.types import MicroBatch

ANSWERS = ((3, 0), (5, 1, 0), (2, 6, 4), (0,))
NUM_PROMPTS, MAX_TOKENS, VOCABULARY, END = len(ANSWERS), 3, 8, 0
EVERY_RESPONSE = tuple(
    response
    for length in range(1, MAX_TOKENS + 1)
    for response in itertools.product(range(VOCABULARY), repeat=length)
    if END not in response[:-1] and (response[-1] == END or length == MAX_TOKENS)
)


Sample = tuple[tuple[int, ...], np.ndarray]


def score(prompt: int, response: Sequence[int]) -> float:
    """The share of places that are right."""
    answer = ANSWERS[prompt]
    return sum(a == b for a, b in zip(answer, response, strict=False)) / max(len(answer), len(response))


SCORES = np.array([[score(prompt, response) for response in EVERY_RESPONSE] for prompt in range(NUM_PROMPTS)])
PADDED = np.array([[*response, *[VOCABULARY] * (MAX_TOKENS - len(response))] for response in EVERY_RESPONSE])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sample: its prompt, its tokens, the sampler's log-probabilities, its group and its credit."""

    prompt: int
    tokens: tuple[int, ...]
    logprobs: np.ndarray
    group: int
    advantage: float


class TablePolicy:
    """Logits of each (prompt, place), float64 [P, T, V]."""

    def __init__(self, logits: torch.Tensor | None = None) -> None:
        shape = (NUM_PROMPTS, MAX_TOKENS, VOCABULARY)
        self.logits = torch.zeros(shape, dtype=torch.float64) if logits is None else logits

    def expected_return(self) -> float:
        """The exact mean score over prompts, by summing over all responses."""
        table = np.pad(log_softmax(self.logits.detach(), -1).numpy(), ((0, 0), (0, 0), (0, 1)))  # padding scores 0
        chances = np.exp(table[:, np.arange(MAX_TOKENS), PADDED].sum(-1))
        return float((chances * SCORES).sum() / NUM_PROMPTS)

    def sample(self, prompt: int, size: int, rng: np.random.Generator) -> list[Sample]:
        """Tokens and their log-probabilities, drawn by inverting the distribution."""
        chances = torch.softmax(self.logits[prompt].detach(), -1).numpy()
        drawn = np.sum(rng.random((size, MAX_TOKENS, 1)) > chances.cumsum(-1)[:, :-1], axis=-1)
        samples: list[Sample] = []
        for row in drawn.tolist():
            tokens = tuple(row[: row.index(END) + 1] if END in row else row)
            samples.append((tokens, np.log(chances[range(len(tokens)), tokens]).astype(np.float32)))
        return samples

    def snapshot(self) -> "TablePolicy":
        return TablePolicy(self.logits.detach().clone())


def teacher_policy(certainty: float = 5.0) -> TablePolicy:
    """Knows the answers."""
    policy = TablePolicy()
    for prompt, answer in enumerate(ANSWERS):
        for place, token in enumerate(answer):
            policy.logits[prompt, place, token] = certainty
    return policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A micro-batch and, for each of its tokens, where its score stands in the table; -1 on prompt tokens."""

    micro_batch: MicroBatch
    prompts: np.ndarray
    places: np.ndarray


JUNK = np.float32("nan")


def pack(
    rows: Sequence[Row], columns: dict[str, TablePolicy | torch.Tensor], prompt_lengths: Sequence[int] = (1, 2)
) -> Part:
    """Rows end to end, each with a prompt in front whose columns are junk."""
    fronts = [prompt_lengths[i % len(prompt_lengths)] for i in range(len(rows))]
    lengths = [front + len(row.tokens) for front, row in zip(fronts, rows, strict=True)]
    numbers = {group: index for index, group in enumerate(dict.fromkeys(row.group for row in rows))}
    spread = [(front, row) for front, row in zip(fronts, rows, strict=True)]

    def over_tokens(front_value: float, values: Callable[[Row], Sequence[float]], dtype: type) -> np.ndarray:
        parts = [np.array([front_value] * front + list(values(row)), dtype) for front, row in spread]
        return np.concatenate(parts) if parts else np.zeros(0, dtype)

    prompts = over_tokens(-1, lambda row: [row.prompt] * len(row.tokens), np.int64)
    places = over_tokens(-1, lambda row: range(len(row.tokens)), np.int64)
    tokens = over_tokens(1, lambda row: row.tokens, np.int32)
    scored = places >= 0
    filled: dict[str, np.ndarray] = {}
    for name, source in columns.items():
        if isinstance(source, TablePolicy):
            table = log_softmax(source.logits.detach(), -1).numpy()[prompts, places, tokens]
        else:
            table = source.detach().numpy()[prompts, places]
        filled[name] = np.where(scored, table, JUNK).astype(np.float32)
    micro_batch = MicroBatch(
        token_ids=tokens,
        position_ids=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths] or [np.zeros(0, np.int32)]),
        sequence_ids=np.repeat(np.arange(len(rows), dtype=np.int32), lengths),
        loss_mask=scored.astype(np.uint8),
        behaviour_logprobs=over_tokens(0.0, lambda row: row.logprobs, np.float32),
        advantages=over_tokens(0.0, lambda row: [row.advantage] * len(row.tokens), np.float32),
        temperature=np.ones(len(rows), np.float32),
        record_ids=tuple(f"g{row.group}/{index}/0" for index, row in enumerate(rows)),
        lags=np.zeros(len(rows), np.int32),
        group_ids=np.array([numbers[row.group] for row in rows], np.int32),
        **filled,
    )
    return Part(micro_batch=micro_batch, prompts=prompts, places=places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of a whole step."""

    tokens: int
    sequences: int
    groups: int

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Counts":
        return cls(
            tokens=sum(len(row.tokens) for row in rows), sequences=len(rows), groups=len({row.group for row in rows})
        )
