# pyright: basic
# torch is only partly typed.
"""Figures of one step: added up over micro-batches, reduced over ranks once, named as in docs/metrics.md."""

import logging
import math
from typing import TYPE_CHECKING, Any

import torch

from headrace.actors.learner.forward import ForwardResult
from headrace.actors.learner.losses.ratios import collapsed_weight_warning, effective_sample_size
from headrace.actors.learner.sharding import RankGroup
from headrace.engine.interfaces import LossOutput
from headrace.engine.types import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

logger = logging.getLogger(__name__)

# Sums and maxima of a loss that have a name of their own; others become actor/<name> and actor/<name>_max.
_MEANS = {
    "clipfrac": "actor/pg_clipfrac",
    "mismatch_kl": "mismatch_kl/mean",
    "mismatch_abs": "importance/gap_abs_mean",
    "importance_weight": "importance/weight_mean",
    "importance_raw": "importance/raw_mean",
    "rejected": "importance/rejected_fraction",
}
_MAXIMA = {"importance_raw": "importance/weight_max"}
# Read together with another one, and no figure of their own.
_COUNTS = ("pairs", "importance_weight_sq")
# These are over pairs, whose count is a sum of its own.
_PAIR_MEANS = ("preference_loss", "preference_accuracy", "preference_margin", "chosen_reward", "rejected_reward")


class StepSums:
    """Collects a step's figures on one rank. The last reduction makes them equal on every rank.

    Attributes:
        suspects: Records of micro-batches whose loss is not finite.
        factor: After `reduce`: what the accumulated gradient has to be multiplied by because rejected units were in the
            planned denominator; the same on every rank, and 0 when nothing is left to learn from.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._computed = 0
        self._tokens = 0
        self._loss_tokens = 0
        self._loss = 0.0
        self._rejected = 0.0
        self._denominator = 1.0
        self.factor = 1.0
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
        self._loss += float(output.loss.detach())
        self._rejected += float(output.rejected)
        self._denominator = output.denominator
        if not bool(torch.isfinite(output.loss)):
            self.suspects += micro_batch.record_ids

    def reduce(self, group: RankGroup, squared_norm: float, num_loss_tokens: int) -> tuple[float, dict[str, float]]:
        """Add up over ranks. Collective.

        `actor/loss` is what the update descends, `actor/pg_loss` a mean over the step's loss tokens that were not
        rejected. Other means are over the tokens that were computed: samples without advantage take no forward pass,
        and must not pull a mean towards 0. Where nothing was computed there is no such mean.

        Args:
            group: The ranks.
            squared_norm: Of this rank's gradient, as accumulated; below 0 leaves it out.
            num_loss_tokens: Of the whole step.

        Returns:
            The squared gradient norm over all ranks before `factor`, and the metrics; figures that are not finite are
            left out.
        """
        names, max_names = sorted(self._sums), sorted(self._maxima)
        counts = [float(self._computed), float(self._tokens), float(self._loss_tokens), self._loss, self._rejected]
        values = [squared_norm, *counts, *(float(self._sums[n]) for n in names)]
        norm, computed, tokens, loss_tokens, loss, rejected, *sums = group.sum(values)
        maxima = group.max([float(self._maxima[name]) for name in max_names])
        left = self._denominator - rejected
        self.factor = self._denominator / left if left > 0 else 0.0
        metrics = _means(dict(zip(names, sums, strict=True)), loss_tokens, num_loss_tokens)
        if loss_tokens:
            metrics |= {_MAXIMA.get(n, f"actor/{n}_max"): value for n, value in zip(max_names, maxima, strict=True)}
        metrics |= {"actor/loss": loss * self.factor, "perf/tokens": tokens, "perf/tokens_computed": computed}
        if norm >= 0:
            metrics["actor/grad_norm"] = math.sqrt(norm) * self.factor
        if group.rank == 0 and loss_tokens:
            _warn_of_collapse(metrics)
        return norm, {name: value for name, value in metrics.items() if math.isfinite(value)}


def _means(sums: dict[str, float], loss_tokens: float, num_loss_tokens: int) -> dict[str, float]:
    if not loss_tokens:  # a 0 would be taken for a measurement, also by what steers the learning rate
        sums = {name: value for name, value in sums.items() if name == "pg_loss"}
    divisors: dict[str, float] = dict.fromkeys(_PAIR_MEANS, sums.get("pairs", 0.0))
    divisors["pg_loss"] = num_loss_tokens - sums.get("rejected", 0.0)
    means = {name: value / max(1.0, divisors.get(name, loss_tokens)) for name, value in sums.items()}
    squares = sums.get("importance_weight_sq", 0.0)
    ess = effective_sample_size(sums.get("importance_weight", 0.0), squares, loss_tokens)
    metrics = {_MEANS.get(name, f"actor/{name}"): value for name, value in means.items() if name not in _COUNTS}
    return metrics | ({"importance/ess": ess} if "importance_weight_sq" in sums else {})


def _warn_of_collapse(metrics: dict[str, float]) -> None:
    weight, gap = metrics.get("importance/raw_mean"), metrics.get("importance/gap_abs_mean")
    warning = None if weight is None or gap is None else collapsed_weight_warning(weight, gap)
    if warning:
        logger.warning("%s", warning)
