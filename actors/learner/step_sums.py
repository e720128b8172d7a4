# pyright: basic
# torch is only partly typed.
"""Figures of one step: added up over micro-batches, reduced over ranks once, named as in docs/metrics.md."""

import math
from typing import TYPE_CHECKING, Any

import torch

from headrace.actors.learner.forward import ForwardResult
from headrace.actors.learner.sharding import RankGroup
from headrace.engine.interfaces import LossOutput
from headrace.engine.types import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

# Sums and maxima of a loss that have a name of their own; others become actor/<name> and actor/<name>_max.
_MEANS = {
    "clipfrac": "actor/pg_clipfrac",
    "mismatch_kl": "mismatch_kl/mean",
    "importance_weight": "importance/weight_mean",
    "importance_raw": "importance/raw_mean",
}
_MAXIMA = {"importance_raw": "importance/weight_max"}


class StepSums:
    """Collects a step's figures on one rank. The last reduction makes them equal on every rank."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._computed = 0
        self._tokens = 0
        self._loss_tokens = 0
        self.suspects: list[str] = []

    def add(self, micro_batch: MicroBatch, result: ForwardResult, output: LossOutput) -> None:
        """Take in one micro-batch; remembers its records if its loss is not finite."""
        self._computed += result.num_computed
        self._tokens += len(micro_batch.token_ids) if micro_batch.loss_mask.any() else 0
        self._loss_tokens += int(micro_batch.loss_mask.sum())
        entropy = result.entropy.detach().sum()
        for name, value in {**output.sums, "entropy": entropy}.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in output.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value
        if not bool(torch.isfinite(output.loss)):
            self.suspects += micro_batch.record_ids

    def reduce(self, group: RankGroup, squared_norm: float, num_loss_tokens: int) -> tuple[float, dict[str, float]]:
        """Add up over ranks. Collective.

        The loss is divided by `num_loss_tokens`, that of the whole step. Other means are over the tokens that were
        computed: samples without advantage take no forward pass, and must not pull a mean towards 0.

        Returns:
            The squared gradient norm over all ranks, and the metrics; figures that are not finite are left out.
        """
        names, max_names = sorted(self._sums), sorted(self._maxima)
        counts = [float(self._computed), float(self._tokens), float(self._loss_tokens)]
        values = [squared_norm, *counts, *(float(self._sums[n]) for n in names)]
        norm, computed, tokens, loss_tokens, *sums = group.sum(values)
        maxima = group.max([float(self._maxima[name]) for name in max_names])
        means = {name: value / max(1.0, loss_tokens) for name, value in zip(names, sums, strict=True)}
        if "pg_loss" in means:
            means["pg_loss"] *= loss_tokens / num_loss_tokens
        metrics = {_MEANS.get(name, f"actor/{name}"): value for name, value in means.items()}
        metrics |= {_MAXIMA.get(n, f"actor/{n}_max"): value for n, value in zip(max_names, maxima, strict=True)}
        metrics |= {"perf/tokens": tokens, "perf/tokens_computed": computed}
        if norm >= 0:
            metrics["actor/grad_norm"] = math.sqrt(norm)
        return norm, {name: value for name, value in metrics.items() if math.isfinite(value)}
