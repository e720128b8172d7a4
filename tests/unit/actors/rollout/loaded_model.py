# pyright: basic
# torch is typed only in part.
"""A small module whose loader does what inference engines' loaders do: fuse, slice, tie, cast, compute."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from headrace.actors.rollout.weight_map import bits
from headrace.engine.weights.changes import WeightChange

HIDDEN, HEADS, KV, VOCAB, WIDE = 8, 8, 4, 12, 6

LAYOUT = {
    "embed.weight": ((VOCAB, HIDDEN), torch.bfloat16),
    "head.weight": ((VOCAB, HIDDEN), torch.bfloat16),
    "q.weight": ((HEADS, HIDDEN), torch.bfloat16),
    "k.weight": ((KV, HIDDEN), torch.bfloat16),
    "v.weight": ((KV, HIDDEN), torch.bfloat16),
    "o.weight": ((HIDDEN, HEADS), torch.bfloat16),
    "gate.weight": ((WIDE, HIDDEN), torch.bfloat16),
    "up.weight": ((WIDE, HIDDEN), torch.bfloat16),
    "norm.weight": ((HIDDEN,), torch.bfloat16),
    "scale": ((HIDDEN,), torch.bfloat16),
}


class LoadedModel(torch.nn.Module):
    """One rank of `ranks`: fused qkv and gate_up sliced by rows, o by columns, a tied head, a norm in float32.

    `scale` is computed by the loader (one is added), so it has no plain place. Rows of the embedding beyond the
    vocabulary are padding.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.num_loads = 0
        self.fail_on: str | None = None

        def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
            module: Any = torch.nn.Module()
            module.weight = torch.nn.Parameter(torch.full(shape, -3.0, dtype=dtype), requires_grad=False)
            return module

        self.embed = weight(VOCAB + 4, HIDDEN)
        self.head: Any = torch.nn.Module()
        self.head.weight = self.embed.weight
        self.qkv = weight((HEADS + 2 * KV) // ranks, HIDDEN)
        self.o = weight(HIDDEN, HEADS // ranks)
        self.gate_up = weight(2 * WIDE // ranks, HIDDEN)
        self.norm = weight(HIDDEN, dtype=torch.float32)
        self.scaled = weight(HIDDEN)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.num_loads += 1
        loaded = set[str]()
        for name, value in weights:
            if name == self.fail_on:
                raise RuntimeError(f"{name} is not loaded today")
            self._load(name, value)
            loaded.add(name)
        return loaded

    def _load(self, name: str, value: torch.Tensor) -> None:
        q, kv, wide = HEADS // self.ranks, KV // self.ranks, WIDE // self.ranks
        if name == "embed.weight":
            self.embed.weight.data[:VOCAB].copy_(value)
            self.embed.weight.data[VOCAB:].fill_(0)
        elif name == "head.weight":
            return
        elif name in ("q.weight", "k.weight", "v.weight"):
            start, rows = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[name[0]]
            part = value.narrow(0, self.rank * rows, rows)
            self.qkv.weight.data.narrow(0, start, rows).copy_(part)
        elif name == "o.weight":
            self.o.weight.data.copy_(value.chunk(self.ranks, dim=1)[self.rank])
        elif name in ("gate.weight", "up.weight"):
            start = 0 if name == "gate.weight" else wide
            self.gate_up.weight.data[start : start + wide] = value[self.rank * wide : (self.rank + 1) * wide]
        elif name == "norm.weight":
            self.norm.weight.data.copy_(value.to("cpu"))
        elif name == "scale":
            self.scaled.weight.data.copy_(value + 1)


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    """Random tensors of the layout; the head is the embedding."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, dtype) in LAYOUT.items()}
    tensors["head.weight"] = tensors["embed.weight"]
    return tensors


def loaded(tensors: dict[str, torch.Tensor], rank: int = 0, ranks: int = 1) -> LoadedModel:
    """A fresh model with these tensors."""
    model = LoadedModel(rank, ranks)
    model.load_weights(tensors.items())
    return model


def difference(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> list[WeightChange]:
    """What leads from one checkpoint to another, as positions and values."""
    changes = []
    for name, value in new.items():
        before, after = bits(old[name]).reshape(-1).numpy(), bits(value).reshape(-1).numpy()
        positions = np.flatnonzero(before != after).astype(np.int32)
        if len(positions):
            values = after[positions].view(f"u{after.itemsize}")
            changes.append(WeightChange(name=name, positions=positions, values=values))
    return changes


def perturbed(tensors: dict[str, torch.Tensor], seed: int, share: float = 0.3) -> dict[str, torch.Tensor]:
    """The same with a share of the elements of each tensor changed."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, value in tensors.items():
        chosen = torch.rand(value.shape, generator=generator) < share
        found[name] = torch.where(chosen, torch.randn(value.shape, generator=generator).to(value.dtype), value)
    if "head.weight" in found:
        found["head.weight"] = found["embed.weight"]
    return found


def same_state(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two models hold the same bits."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(bits(a[name]), bits(b[name])) for name in a)
