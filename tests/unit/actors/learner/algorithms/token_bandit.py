"""A token bandit: a policy small enough that its return is exact, with everything a step of the runtime has.

Loaded by conftest.py, after the module that it imports beside it.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from table_policy import (
    ANSWERS,
    EVERY_RESPONSE,
    MAX_TOKENS,
    NUM_PROMPTS,
    PADDED,
    SCORES,
    Counts,
    Part,
    Row,
    Sample,
    TablePolicy,
    pack,
    score,
    teacher_policy,
)
from torch.nn.functional import log_softmax

from headrace.actors.learner.algorithms.ppo import Ppo
from headrace.actors.learner.loss_inputs import TensorLossInputs
from headrace.engine.interfaces import Algorithm
from headrace.engine.testing.check_algorithm import SampleGroup, make_group


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
