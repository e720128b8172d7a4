# pyright: basic
# torch is only partly typed.
"""Log-probabilities and entropies straight from hidden states: the logits of all tokens never exist at once.

`token_logprobs.py` is the plain form, for logits that are there already. Here the output projection, the softmax and
the entropy are one function. It works on blocks of some tokens by some words, in buffers that all blocks share:

- Forward, a running maximum, sum of exponentials and first moment a token (Milakov and Gimelshein, "Online normalizer
  calculation for softmax", 2018, algorithm 3; the first moment is rescaled in the same way). What is kept for the
  backward pass is one number of each kind a token.
- Backward, each block's logits are computed a second time and turned into their gradient in place. That is one matrix
  product more than the plain form has (four against three).

The outer loop goes over the vocabulary: each word's row of the weight is read, and its gradient finished, in one go, so
the gradient of the weight needs no second buffer, and with 16-bit weights only a float32 block of one.
"""

from typing import TYPE_CHECKING, Any

import torch

from headrace.actors.learner.logit_blocks import (
    LogitBlocks,
    LogitGradient,
    add_product,
    columns_of,
    operand,
    slices,
    working_dtype,
)
from headrace.engine.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

# Logits worked on at a time, 16 MiB on a CPU: a smaller block stays in its cache, which gains little, but threads have
# to meet more often, which costs much where cores are shared. A GPU wants few and large kernels: below 128 MiB a block
# its time is that of launching them.
_BLOCK_ELEMENTS = {"cpu": 4 << 20}
_OTHER_BLOCK_ELEMENTS = 32 << 20
_CHUNK_TOKENS = {"cpu": 1024}
_OTHER_CHUNK_TOKENS = 8192

# Below any logit, and still finite when logits are subtracted from it, so that the first block needs no special case.
_LOWEST = -1e30


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    temperature: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Score tokens under `cap(hidden @ weight.T + bias) / temperature`, with `cap(z) = softcap * tanh(z / softcap)`.

    Extra memory, forward and backward alike, is about three blocks of `chunk_tokens * chunk_vocab` elements in float32
    and, where hidden states have 16 bits, float32 copies of them; the gradients that are returned come on top. Products
    of 16-bit inputs are summed in float32 and their logits are not rounded to 16 bits, so results may be nearer to the
    exact ones than those of the plain form. Gradients flow to `hidden`, `weight` and `bias`, from either output or
    both; an output that is not differentiated costs nothing in the backward pass. There is no second derivative.

    Args:
        hidden: [K, H], floating.
        weight: [V, H], of the same dtype.
        token_ids: int64 [K], each in [0, V). One outside raises on the CPU and gives NaN on a GPU, where asking would
            stall it.
        temperature: [K], above 0, floating. No gradient.
        bias: [V], of the same dtype.
        softcap: Bound of the logits, above 0, in units of a logit before the temperature.
        chunk_tokens: Tokens a block; by default chosen for the device. Need not divide K.
        chunk_vocab: Words a block, likewise.

    Returns:
        Log-probabilities and entropies in nats, [K] each; float64 for float64 inputs, else float32.

    Raises:
        InputError: Shapes or dtypes do not fit, a chunk is below 1, or the soft-cap is not above 0.
    """
    _check(hidden, weight, token_ids, temperature, bias)
    num_tokens, num_words = max(hidden.shape[0], 1), max(weight.shape[0], 1)
    if chunk_tokens is None:
        chunk_tokens = _CHUNK_TOKENS.get(hidden.device.type, _OTHER_CHUNK_TOKENS)
    if chunk_vocab is None:
        elements = _BLOCK_ELEMENTS.get(hidden.device.type, _OTHER_BLOCK_ELEMENTS)
        chunk_vocab = max(1, elements // max(1, min(chunk_tokens, num_tokens)))
    if chunk_tokens < 1 or chunk_vocab < 1 or (softcap is not None and not softcap > 0):
        raise InputError(
            f"chunk_tokens is {chunk_tokens}, chunk_vocab {chunk_vocab} and softcap {softcap}: the chunks must be at "
            "least 1, and a soft-cap above 0"
        )
    blocks = LogitBlocks(softcap, min(chunk_tokens, num_tokens), min(chunk_vocab, num_words))
    score: Any = _LinearLogprobs.apply  # untyped in torch
    logprobs, entropies = score(hidden, weight, bias, token_ids, temperature, blocks)
    return logprobs, entropies


def _check(hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: Tensor, bias: Tensor | None) -> None:
    given = [tuple(tensor.shape) for tensor in (hidden, weight, token_ids, temperature)]
    rows = hidden.shape[:1]
    fits = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1] and weight.shape[0] > 0
    fits = fits and token_ids.shape == temperature.shape == rows and (bias is None or bias.shape == weight.shape[:1])
    if not fits:
        raise InputError(
            f"hidden, weight, token_ids and temperature have shapes {given}, the bias "
            f"{None if bias is None else tuple(bias.shape)}: they must be [K, H], [V, H], [K], [K] and [V]"
        )
    dtypes = {tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}
    if len(dtypes) > 1 or not hidden.is_floating_point() or token_ids.dtype != torch.int64:
        raise InputError(
            f"hidden states are {hidden.dtype}, the weight {weight.dtype}, ids {token_ids.dtype}: hidden states, "
            "weight and bias need one floating dtype, ids torch.int64"
        )
    if token_ids.device.type == "cpu" and token_ids.numel():
        low, high = (int(bound) for bound in token_ids.aminmax())
        if low < 0 or high >= weight.shape[0]:
            raise InputError(f"token ids go from {low} to {high}: the vocabulary has {weight.shape[0]} words")


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        temperature: Tensor,
        blocks: LogitBlocks,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        states, scale = operand(hidden), temperature.to(working_dtype(hidden))
        # Of the words so far, a token: largest logit, sum of exponentials below it, first moment of logit minus it.
        peak = scale.new_full(scale.shape, _LOWEST)
        total, moment = torch.zeros_like(peak), torch.zeros_like(peak)
        chosen = torch.full_like(peak, torch.nan)
        first, second = blocks.buffer(scale), blocks.buffer(scale)
        for words in slices(weight.shape[0], blocks.chunk_vocab):
            part, offset = operand(weight[words]), None if bias is None else bias[words]
            for rows in slices(hidden.shape[0], blocks.chunk_tokens):
                logits = blocks.logits(states[rows], part, offset, first)
                column, inside = columns_of(token_ids[rows], words)
                here = logits.gather(1, column[:, None]).squeeze(1) / scale[rows]
                chosen[rows] = torch.where(inside, here, chosen[rows])
                new_peak = torch.maximum(peak[rows], logits.amax(1) / scale[rows])
                below = torch.addcdiv(-new_peak[:, None], logits, scale[rows, None], out=logits)
                weights = torch.exp(below, out=second[: below.numel()].view_as(below))
                fallen = peak[rows] - new_peak
                shrunk = total[rows] * fallen.exp()
                moment[rows] = moment[rows] * fallen.exp() + shrunk * fallen
                total[rows] = shrunk + weights.sum(1)
                moment[rows] += below.mul_(weights).sum(1)
                peak[rows] = new_peak
        log_sums = peak + total.log()
        entropies = total.log() - moment / total
        ctx.save_for_backward(hidden, weight, bias, token_ids, temperature, log_sums, entropies)
        ctx.blocks = blocks
        return chosen - log_sums, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, bias, token_ids, temperature, log_sums, entropies = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        if of_logprobs is None and of_entropies is None:
            return None, None, None, None, None, None
        gradient = LogitGradient(ctx.blocks, token_ids, temperature, log_sums, entropies, of_logprobs, of_entropies)
        states = operand(hidden)
        of_hidden = torch.zeros_like(hidden, dtype=log_sums.dtype) if wants_hidden else None
        of_weight = torch.zeros_like(weight) if wants_weight else None
        of_bias = torch.zeros_like(bias, dtype=log_sums.dtype) if wants_bias else None
        for words in slices(weight.shape[0], ctx.blocks.chunk_vocab):
            part, offset = operand(weight[words]), None if bias is None else bias[words]
            of_part = None
            if of_weight is not None:
                of_part = of_weight[words]
                if of_part.dtype != log_sums.dtype:
                    of_part = torch.zeros_like(of_part, dtype=log_sums.dtype)
            for rows in slices(hidden.shape[0], ctx.blocks.chunk_tokens):
                block = gradient.block(states[rows], part, offset, rows, words)
                if of_bias is not None:
                    of_bias[words] += block.sum(0)
                factor = gradient.rounded(block, states.dtype)
                if of_hidden is not None:
                    add_product(of_hidden[rows], factor, part)
                if of_part is not None:
                    add_product(of_part, factor.t(), states[rows], first=rows.start == 0)
            if of_weight is not None and of_part is not None and of_part.dtype != of_weight.dtype:
                of_weight[words] = of_part
        return (
            None if of_hidden is None else of_hidden.to(hidden.dtype),
            of_weight,
            None if of_bias is None else of_bias.to(hidden.dtype),
            None,
            None,
            None,
        )
