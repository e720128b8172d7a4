# pyright: basic
# torch is only partly typed.
"""Log-probabilities and entropies of chosen tokens, without a second full-vocabulary tensor."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

# Logits worked on at a time, in float32: 32 MiB.
_CHUNK_ELEMENTS = 8 << 20


def token_logprobs(
    logits: Tensor, token_ids: Tensor, temperature: Tensor, *, chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Score tokens under logits divided by the temperature.

    Works in float32 on a few rows at a time, in the backward pass too, where probabilities are computed again; an
    ordinary loop over chunks would keep every chunk alive for autograd.

    Args:
        logits: [K, V], any floating dtype.
        token_ids: int64 [K].
        temperature: float32 [K], above 0.
        chunk_tokens: Rows at a time; by default as many as fit into 32 MiB.

    Returns:
        Log-probabilities and entropies in nats, float32 [K] each, both differentiable.
    """
    if chunk_tokens is None:
        chunk_tokens = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    score: Any = _TokenLogprobs.apply  # untyped in torch
    logprobs, entropies = score(logits, token_ids, temperature, chunk_tokens)
    return logprobs, entropies


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token_ids: Tensor, temperature: Tensor, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        logprobs = logits.new_empty(logits.shape[0], dtype=torch.float32)
        log_sums, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for rows in _chunks(logits.shape[0], chunk_tokens):
            scaled = logits[rows].float() / temperature[rows, None]
            log_sum = scaled.logsumexp(-1)
            chosen = scaled.gather(-1, token_ids[rows, None]).squeeze(-1)
            probabilities = torch.exp(scaled - log_sum[:, None])
            entropies[rows] = log_sum - (probabilities * scaled).sum(-1)
            logprobs[rows] = chosen - log_sum
            log_sums[rows] = log_sum
        ctx.save_for_backward(logits, token_ids, temperature, log_sums, entropies)
        ctx.chunk_tokens = chunk_tokens
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        logits, token_ids, temperature, log_sums, entropies = ctx.saved_tensors
        if of_logprobs is None and of_entropies is None:
            return None, None, None, None
        gradient = torch.empty_like(logits)
        for rows in _chunks(logits.shape[0], ctx.chunk_tokens):
            # d logp(id) / dz = onehot(id) - p;  dH / dz = -p (log p + H);  z = logits / temperature
            log_p = logits[rows].float() / temperature[rows, None] - log_sums[rows, None]
            p = log_p.exp()
            d = torch.zeros_like(p)
            if of_logprobs is not None:
                d -= of_logprobs[rows, None] * p
                d.scatter_add_(-1, token_ids[rows, None], of_logprobs[rows, None])
            if of_entropies is not None:
                d -= of_entropies[rows, None] * p * (log_p + entropies[rows, None])
            gradient[rows] = (d / temperature[rows, None]).to(gradient.dtype)
        return gradient, None, None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
