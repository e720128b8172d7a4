"""A token bandit: a policy that is a table, small enough that its return is exact, with everything a step has.

Four prompts, eight tokens, responses of one to three tokens (token 0 ends one). Each prompt has one right answer, and
an answer earns the share of its places that are right. The junk below stands where no loss may look: prompt tokens
carry scores of a parameter of their own, which must never get a gradient, and columns that are not finite.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax

from headrace.actors.learner.algorithms.ppo import Ppo
from headrace.actors.learner.loss_inputs import TensorLossInputs
from headrace.engine.interfaces import Algorithm
from headrace.engine.testing.check_algorithm import SampleGroup, make_group
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


class Adam:
    """arXiv 1412.6980, algorithm 1, for one tensor; torch's own takes seconds to import its compiler."""

    def __init__(self, parameter: torch.Tensor, learning_rate: float) -> None:
        self.parameter, self.learning_rate, self.time = parameter, learning_rate, 0
        self.mean, self.square = torch.zeros_like(parameter), torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self) -> None:
        gradient = self.parameter.grad
        assert gradient is not None
        self.time += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        size = (self.square / (1 - 0.999**self.time)).sqrt() + 1e-8
        self.parameter -= self.learning_rate * self.mean / (1 - 0.9**self.time) / size


class Bandit:
    """One run of one method: samples, credit, a loss in two micro-batches, and Adam; the steps of the real runtime.

    Rewards are `offset` above the scores, which a method without its baseline would take for success.

    Attributes:
        history: Exact mean score, before the first update and after each.
        num_replaced: Groups that were not kept.
        num_flat: Groups that were trained on although their scores are all equal.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        group_size: int = 8,
        staleness: int = 2,
        learning_rate: float = 0.2,
        kl_coef: float = 0.0,
        offset: float = 5.0,
    ) -> None:
        self.algorithm, self.group_size, self.kl_coef = algorithm, group_size, kl_coef
        self.policy = TablePolicy()
        self.policy.logits.requires_grad_(True)
        self.junk = torch.zeros((), dtype=torch.float64, requires_grad=True)
        self.offset = offset
        self.critic = torch.full((NUM_PROMPTS, MAX_TOKENS), offset, requires_grad=True)
        self.reference, self.teacher = self.policy.snapshot(), teacher_policy()
        self.optimizer = Adam(self.policy.logits, learning_rate)
        self.critic_optimizer = Adam(self.critic, learning_rate)
        self.rng = np.random.default_rng(7)
        self.served = deque([self.policy.snapshot()], maxlen=staleness + 1)
        self.history: list[float] = []
        self.num_replaced, self.num_flat = 0, 0

    def run(self, num_updates: int) -> "Bandit":
        self.history.append(self.policy.expected_return())
        for _ in range(num_updates):
            self.step(self.batch())
            self.served.append(self.policy.snapshot())
            self.history.append(self.policy.expected_return())
        return self

    def batch(self) -> list[Row]:
        """Samples of the oldest policy still served, with their credit."""
        samples: list[tuple[int, Sample]] = []
        groups = []
        for prompt in range(NUM_PROMPTS):
            drawn = self._kept_group(prompt)
            if not drawn:
                continue
            samples += [(prompt, sample) for sample in drawn]
            raw = self._raw_group(prompt, drawn)
            self.num_flat += not np.ptp(raw.rewards)
            shaped = self.algorithm.shape_rewards(raw)
            groups.append(make_group(shaped.tolist(), raw.group_id, lengths=raw.lengths.tolist()))
        if self.algorithm.traits.credit_scope == "batch":
            credit = self.algorithm.assign_credit(groups)
        else:
            credit = [self.algorithm.assign_credit([group])[0] for group in groups]
        return [
            Row(prompt=prompt, tokens=tokens, logprobs=logprobs, group=prompt, advantage=float(advantage))
            for (prompt, (tokens, logprobs)), advantage in zip(samples, np.concatenate(credit), strict=True)
        ]

    def _kept_group(self, prompt: int) -> list[Sample]:
        """A group that is not kept is sampled again, some times; empty where none was kept."""
        kind = self.algorithm.traits.trains_on
        for _ in range(4):
            if kind == "demonstrations":
                drawn = self._demonstrations(prompt)
            else:
                drawn = self.served[0].sample(prompt, 2 if kind == "preference_pairs" else self.group_size, self.rng)
            if self.algorithm.keeps(self._raw_group(prompt, drawn)):
                return drawn
            self.num_replaced += 1
        return []

    def _raw_group(self, prompt: int, drawn: Sequence[Sample]) -> SampleGroup:
        scores = [self.offset + score(prompt, tokens) for tokens, _ in drawn]
        return make_group(scores, f"g{prompt}", lengths=[len(tokens) for tokens, _ in drawn])

    def _demonstrations(self, prompt: int) -> list[Sample]:
        """Three of four are the right answer; no sampler's scores."""
        guesses = self.reference.sample(prompt, self.group_size, self.rng)
        right = self.rng.random(self.group_size) < 0.75
        answers = [ANSWERS[prompt] if know else tokens for know, (tokens, _) in zip(right, guesses, strict=True)]
        return [(tokens, np.zeros(len(tokens), np.float32)) for tokens in answers]

    def every_response(self, prompt: int, baseline: float) -> list[Row]:
        """All responses of the oldest served policy, each once, with its chance and all others' number in its credit.

        A mean over them is then the expectation over that policy.
        """
        table = log_softmax(self.served[0].logits, -1).numpy()
        rows: list[Row] = []
        for response, value in zip(EVERY_RESPONSE, SCORES[prompt], strict=True):
            logprobs = table[prompt, range(len(response)), response]
            credit = float((value - baseline) * np.exp(logprobs.sum()) * len(EVERY_RESPONSE))
            row = Row(prompt=prompt, tokens=response, logprobs=logprobs.astype(np.float32), group=0, advantage=credit)
            rows.append(row)
        return rows

    def gradient_of_return(self, prompt: int) -> torch.Tensor:
        """Of the exact expected score of one prompt, float64 [T, V], by its logits."""
        logits = self.policy.logits.detach()[prompt].requires_grad_(True)
        table = torch.nn.functional.pad(log_softmax(logits, -1), (0, 1))
        chances = table[torch.arange(MAX_TOKENS), torch.from_numpy(PADDED)].sum(-1).exp()
        (chances * torch.from_numpy(SCORES[prompt])).sum().backward()
        assert logits.grad is not None
        return logits.grad

    def pack(self, rows: Sequence[Row]) -> Part:
        """Rows as one micro-batch with the columns that the method asks for."""
        return pack(rows, self.columns())

    def columns(self) -> dict[str, TablePolicy | torch.Tensor]:
        sources = {"reference_logprobs": self.reference, "teacher_logprobs": self.teacher, "values": self.critic}
        return {name: sources[name] for name in self.algorithm.traits.columns}

    def step(self, rows: Sequence[Row]) -> None:
        """One update, in two micro-batches that part groups where the method allows it."""
        traits, step, counts = self.algorithm.traits, rows, Counts.of(rows)
        rows = [row for row in step if row.advantage or not traits.skips_zero_credit]
        border = len(rows) // 2 // 2 * 2 if traits.whole_groups else len(rows) // 2
        self.policy.logits.grad = self.critic.grad = None
        rejected, denominator = 0.0, 1.0
        for half in (rows[:border], rows[border:]):
            part = self.pack(half)
            output = self.algorithm.loss(self.loss_inputs(part, step))
            output.loss.backward()
            rejected, denominator = rejected + float(output.rejected), output.denominator
            if isinstance(self.algorithm, Ppo):
                values = torch.where(torch.from_numpy(part.places >= 0), self.critic[part.prompts, part.places], 0.0)
                self.algorithm.critic_loss(
                    values, part.micro_batch, num_loss_tokens=counts.tokens, num_sequences=counts.sequences
                ).loss.backward()
        if rejected < denominator:
            assert self.policy.logits.grad is not None
            self.policy.logits.grad *= denominator / (denominator - rejected)
            self.optimizer.step()
        if self.critic.grad is not None:
            self.critic_optimizer.step()

    def loss_inputs(self, part: Part, step: Sequence[Row]) -> TensorLossInputs:
        """What a loss sees of one micro-batch of a step of these rows."""
        counts = Counts.of(step)
        table = log_softmax(self.policy.logits, -1)
        tokens = torch.from_numpy(part.micro_batch.token_ids.astype(np.int64))
        prompts, places = torch.from_numpy(part.prompts), torch.from_numpy(part.places)
        scored = places >= 0
        logprobs = torch.where(scored, table[prompts, places, tokens], self.junk).float()
        entropy = -(table.exp() * table).sum(-1)[prompts, places]
        return TensorLossInputs.build(
            part.micro_batch,
            logprobs=logprobs,
            entropy=torch.where(scored, entropy, self.junk).float() if self.algorithm.traits.needs_entropy else None,
            advantages=self.algorithm.token_advantages(part.micro_batch),
            num_loss_tokens=counts.tokens,
            num_sequences=counts.sequences,
            num_groups=counts.groups,
            kl_coef=self.kl_coef,
        )


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


@pytest.fixture
def bandit() -> type[Bandit]:
    return Bandit
