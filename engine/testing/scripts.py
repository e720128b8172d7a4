"""What a scripted backend says: token ids as a pure function of the request and a generator."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.engine.types import GenerateRequest

# Gives the whole response, the end token included; `max_tokens` and stop tokens cut it afterwards.
Script = Callable[[GenerateRequest, np.random.Generator], Sequence[int]]
# Draws the number of response tokens, at least 1.
Lengths = Callable[[np.random.Generator], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLength:
    """Every response has `num_tokens` tokens."""

    num_tokens: int

    def __call__(self, rng: np.random.Generator) -> int:
        return self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalLengths:
    """Lengths as reasoning models have them: most short, a long tail.

    Attributes:
        median: Tokens; half of the responses are shorter.
        sigma: Standard deviation of the logarithm; 1.0 puts one percent above ten times the median.
        longest: Draws above it are cut to it.
    """

    median: float
    sigma: float = 1.0
    longest: int = 1 << 20

    def __call__(self, rng: np.random.Generator) -> int:
        return int(min(self.longest, max(1, round(rng.lognormal(math.log(self.median), self.sigma)))))


def random_script(lengths: Lengths, *, vocabulary_size: int = 1000, end_token_id: int = 0) -> Script:
    """Uniform tokens other than `end_token_id`, then `end_token_id`; `lengths` counts them all."""

    def script(request: GenerateRequest, rng: np.random.Generator) -> Sequence[int]:
        num_tokens = lengths(rng)
        tokens = rng.integers(1, vocabulary_size, num_tokens)
        tokens[tokens == end_token_id] = vocabulary_size - 1 if end_token_id != vocabulary_size - 1 else 1
        tokens[-1] = end_token_id
        return [int(token) for token in tokens]

    return script


def constant_script(token_ids: Sequence[int]) -> Script:
    """The same response to every request."""
    return lambda request, rng: token_ids
