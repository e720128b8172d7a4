# pyright: basic
# torch is only partly typed.
"""Blocks of logits, some tokens by some words, and their gradients: what `linear_logprobs.py` walks over."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


@dataclass(frozen=True, slots=True)
class LogitBlocks:
    softcap: float | None
    chunk_tokens: int
    chunk_vocab: int

    def buffer(self, like: Tensor) -> Tensor:
        return like.new_empty(self.chunk_tokens * self.chunk_vocab)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """Logits of a block before the temperature, [rows, words], in `out`."""
        rows, words = hidden.shape[0], weight.shape[0]
        logits = out[: rows * words].view(rows, words)
        add_product(logits, hidden, weight.t(), first=True)
        if bias is not None:
            logits += bias
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


class LogitGradient:
    """d loss / d logits before the temperature, block by block.

    With z = logits / temperature and p = softmax(z): d logp(id) / dz = onehot(id) - p; dH / dz = -p (log p + H).
    """

    def __init__(
        self,
        blocks: LogitBlocks,
        token_ids: Tensor,
        temperature: Tensor,
        log_sums: Tensor,
        entropies: Tensor,
        of_logprobs: Tensor | None,
        of_entropies: Tensor | None,
    ) -> None:
        self._blocks = blocks
        self._token_ids = token_ids
        self._scale = temperature.to(log_sums.dtype)
        self._log_sums, self._entropies = log_sums, entropies
        # Both are divided by the temperature once, here, and not again for each word.
        self._of_logprobs = None if of_logprobs is None else of_logprobs / self._scale
        self._of_entropies = None if of_entropies is None else of_entropies / self._scale
        self._buffers = [blocks.buffer(log_sums) for _ in range(2 if blocks.softcap is None else 3)]

    def block(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: slice, words: slice) -> Tensor:
        """[rows, words]; valid until the next call."""
        logits = self._blocks.logits(hidden, weight, bias, self._buffers[0])
        slope = None
        if self._blocks.softcap is not None:  # d cap(z) / dz = 1 - (cap(z) / softcap)^2
            slope = torch.div(logits, self._blocks.softcap, out=self._buffers[2][: logits.numel()].view_as(logits))
            slope.square_().neg_().add_(1)
        log_p = torch.addcdiv(-self._log_sums[rows, None], logits, self._scale[rows, None], out=logits)
        gradient = torch.exp(log_p, out=self._buffers[1][: log_p.numel()].view_as(log_p))
        if self._of_entropies is not None:
            # -p (of_logprobs + of_entropies (log p + H)), in one pass over log p and one over p.
            slope_of_log_p = -self._of_entropies[rows]
            constant = slope_of_log_p * self._entropies[rows]
            if self._of_logprobs is not None:
                constant = constant - self._of_logprobs[rows]
            gradient.mul_(torch.addcmul(constant[:, None], log_p, slope_of_log_p[:, None], out=log_p))
        else:
            assert self._of_logprobs is not None, "one of the two is differentiated"
            gradient.mul_(-self._of_logprobs[rows, None])
        if self._of_logprobs is not None:
            column, inside = columns_of(self._token_ids[rows], words)
            gradient.scatter_add_(1, column[:, None], (self._of_logprobs[rows] * inside)[:, None])
        return gradient if slope is None else gradient.mul_(slope)

    def rounded(self, block: Tensor, dtype: torch.dtype) -> Tensor:
        """The last block in another dtype, in a buffer that it needs no more; valid until the next one."""
        if block.dtype == dtype:
            return block
        return self._buffers[0].view(dtype)[: block.numel()].view_as(block).copy_(block)


def columns_of(token_ids: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Each token's column in a block of words, clamped into it, and whether it is really there."""
    column = token_ids - words.start
    last = words.stop - words.start - 1
    return column.clamp(0, last), (column >= 0) & (column <= last)


def working_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def operand(tensor: Tensor) -> Tensor:
    """A factor of a matrix product: bfloat16 stays as it is where the device sums its products in float32.

    CPUs round such products to bfloat16, and so does torch before 2.8, which cannot be asked for another result.
    float16 is widened everywhere: small gradients would vanish in it.
    """
    if tensor.dtype == torch.bfloat16 and tensor.device.type == "cuda" and torch.__version__ >= "2.8":
        return tensor
    return tensor.to(working_dtype(tensor))


def add_product(target: Tensor, left: Tensor, right: Tensor, *, first: bool = False) -> None:
    """target += left @ right, in the target's dtype; with `first`, what the target holds is overwritten."""
    if left.dtype == target.dtype:
        target.addmm_(left, right, beta=0 if first else 1)
    elif first:
        torch.mm(left, right, out_dtype=target.dtype, out=target)
    else:
        target += torch.mm(left, right, out_dtype=target.dtype)


def slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
