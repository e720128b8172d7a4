# pyright: basic
# torch and transformers are typed only in part.
"""The decode loop of `TransformersBackend`: rows join and leave a left-padded batch between iterations.

Invariants:
- Position ids count real tokens only (cumulative mask minus one, at least 0), so a row's scores depend neither on the
  padding nor on its companions.
- A token's log-probability comes from the very distribution it was drawn from: after temperature, top-k and top-p. At
  temperature 0 it is that of the distribution at temperature 1.
- A row's numbers come from its own generator, so a seed gives the same sample whatever else runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from headrace.engine.types import FinishReason, GenerateRequest


@dataclass(eq=False, kw_only=True)
class Row:
    """One sample.

    Attributes:
        token_ids: The response so far.
        decode: Ids to text; only needed with stop strings.
        cancelled: Set by anyone at any time; the row leaves before the next iteration.
    """

    request: GenerateRequest
    generator: torch.Generator
    decode: Callable[[list[int]], str] | None = None
    token_ids: list[int] = field(default_factory=list)
    cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What an iteration gave a row. `logprob` is in nats."""

    row: Row
    token_id: int
    logprob: float
    finish_reason: FinishReason


class DecodeBatch:
    """Rows in flight with their key-value cache. Not thread-safe: one thread calls everything."""

    def __init__(self, model: Any, end_ids: frozenset[int]) -> None:
        self._model = model
        self._end_ids = end_ids
        self._device = next(model.parameters()).device
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=self._device)  # [B, L]; 1 for real tokens
        self._cache: list[tuple[torch.Tensor, torch.Tensor]] = []  # a layer's keys and values, [B, heads, L, width]
        self.rows: list[Row] = []

    @torch.inference_mode()
    def admit(self, rows: Sequence[Row]) -> list[Sampled]:
        """Run the prompts of new rows and draw the first token of each; the rows then take part in `step`."""
        longest = max(len(row.request.token_ids) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for index, row in enumerate(rows):
            prompt = torch.tensor(row.request.token_ids)
            ids[index, longest - len(prompt) :] = prompt
            mask[index, longest - len(prompt) :] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        logits, cache = self._forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), DynamicCache())
        self._merge(mask, cache)
        self.rows.extend(rows)
        return self._sample(list(rows), logits)

    @torch.inference_mode()
    def step(self) -> list[Sampled]:
        """Draw one more token for every row; finished rows have left when this returns."""
        ids = torch.tensor([[row.token_ids[-1]] for row in self.rows], device=self._device)
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        positions = self._mask.sum(-1, keepdim=True) - 1
        logits, self._cache = self._forward(ids, self._mask, positions, DynamicCache(self._cache))
        return self._sample(list(self.rows), logits)

    @torch.inference_mode()
    def remove(self, leaving: Sequence[Row]) -> None:
        """Take rows out, and the columns that only they needed."""
        gone = set(map(id, leaving))
        kept = [index for index, row in enumerate(self.rows) if id(row) not in gone]
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in kept]
        if not kept:
            self._mask, self._cache = self._mask[:0, :0], []
            return
        index = torch.tensor(kept, device=self._device)
        self._mask = self._mask[index]
        # Left padding that no row needs any more: columns before the first 1 of the longest row.
        start = int(self._mask.argmax(-1).min())
        self._mask = self._mask[:, start:]
        self._cache = [(keys[index, :, start:], values[index, :, start:]) for keys, values in self._cache]

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Logits of the last column, float32 [B, V], and the grown cache."""
        output = self._model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        grown = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
        # On the CPU, where the rows' generators are.
        return output.logits[:, -1].float().cpu(), grown

    def _merge(self, mask: torch.Tensor, cache: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if not self.rows:
            self._mask, self._cache = mask, cache
            return
        length = max(self._mask.shape[1], mask.shape[1])
        self._mask = torch.cat([_pad_left(self._mask, length, 1), _pad_left(mask, length, 1)])
        self._cache = [
            (
                torch.cat([_pad_left(old_keys, length, 2), _pad_left(keys, length, 2)]),
                torch.cat([_pad_left(old_values, length, 2), _pad_left(values, length, 2)]),
            )
            for (old_keys, old_values), (keys, values) in zip(self._cache, cache, strict=True)
        ]

    def _sample(self, rows: list[Row], logits: torch.Tensor) -> list[Sampled]:
        sampled = []
        for row, scores in zip(rows, logits, strict=True):
            token, logprob = draw(scores, row)
            row.token_ids.append(token)
            reason = self._finish_reason(row, token)
            sampled.append(Sampled(row=row, token_id=token, logprob=logprob, finish_reason=reason))
        self.remove([item.row for item in sampled if item.finish_reason is not FinishReason.NONE])
        return sampled

    def _finish_reason(self, row: Row, token: int) -> FinishReason:
        sampling = row.request.sampling
        if token in self._end_ids or token in sampling.stop_token_ids or _has_stop_string(row):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(row.token_ids) >= sampling.max_tokens else FinishReason.NONE


def draw(scores: torch.Tensor, row: Row) -> tuple[int, float]:
    """A token and its log-probability from logits, float32 [V]."""
    sampling = row.request.sampling
    if sampling.temperature == 0:
        logprobs = torch.log_softmax(scores, -1)
        token = int(scores.argmax())
        return token, float(logprobs[token])
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        order = scores.argsort(descending=True)
        probabilities = torch.softmax(scores[order], -1)
        # The first token that reaches top_p belongs to the nucleus.
        outside = probabilities.cumsum(-1) - probabilities >= sampling.top_p
        scores = scores.index_fill(0, order[outside], -torch.inf)
    logprobs = torch.log_softmax(scores, -1)
    # The smallest of exponential times at these rates falls on a token with its probability.
    times = torch.empty_like(logprobs).exponential_(generator=row.generator)
    token = int((logprobs - times.log()).argmax())
    return token, float(logprobs[token])


def _has_stop_string(row: Row) -> bool:
    stops = row.request.sampling.stop
    if not stops or row.decode is None:
        return False
    # A character takes at most four tokens of a byte-level vocabulary, so this tail holds every stop string.
    tail = row.token_ids[-(4 * max(map(len, stops)) + 4) :]
    text = row.decode(tail)
    return any(stop in text for stop in stops)


def _pad_left(tensor: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    missing = length - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], dim)
