# pyright: basic
# torch is only partly typed.
"""AdamW with linear warm-up and decay, clipped on the global norm; a step whose norm is not finite changes nothing.

Invariant: the decision to skip is taken on a reduced number, so ranks cannot disagree. Skipping touches neither
weights, moments nor schedule.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace.actors.learner.sharding import local_gradients
from headrace.engine.config.schema import LearnerConfig

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

_MOMENTS = ("exp_avg", "exp_avg_sq")


def warmup_rate(base: float, warmup_steps: int, updates_done: int) -> float:
    """Learning rate of the next update: base * (n + 1) / warmup_steps for the first ones, then base."""
    return base * min(1.0, (updates_done + 1) / warmup_steps) if warmup_steps else base


def decay_factor(decay_steps: int, updates_done: int) -> float:
    """Falls from 1 at the first update linearly to 0 after `decay_steps`; 1 throughout with 0."""
    return max(0.0, 1.0 - updates_done / decay_steps) if decay_steps else 1.0


class ShardedAdamW:
    """The optimizer of one rank's shards. Its moments are allocated at once, so a lack of memory shows at the start.

    Attributes:
        updates: Updates applied so far; skipped ones do not count.
        rate_factor: Multiplies the schedule's rate.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: LearnerConfig) -> None:
        self._parameters = dict(parameters)
        self._config = config
        self.updates = 0
        self.rate_factor = 1.0
        self._adam = torch.optim.AdamW(
            self._parameters.values(),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for parameter in self._parameters.values():
            self._adam.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
            }

    @property
    def next_rate(self) -> float:
        """Learning rate of the next update: warm-up times decay, times the factor."""
        risen = warmup_rate(self._config.learning_rate, self._config.warmup_steps, self.updates)
        return risen * decay_factor(self._config.decay_steps, self.updates) * self.rate_factor

    def squared_norm(self) -> float:
        """Sum of squares of this rank's gradient elements; add it up over ranks before `apply`."""
        gradients = [gradient for gradient in local_gradients(self._parameters.values()) if gradient.numel()]
        if not gradients:
            return 0.0
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
        return float((norms.double() ** 2).sum())

    def apply(self, global_squared_norm: float, *, factor: float = 1.0) -> bool:
        """Clip and update, or skip where the norm is not finite. Gradients are gone afterwards.

        Args:
            global_squared_norm: Over all ranks, before `factor`; the same number on each.
            factor: Multiplies each gradient before it is clipped; above 0.

        Returns:
            Whether weights changed.
        """
        finite = math.isfinite(global_squared_norm)
        if finite:
            limit = self._config.max_grad_norm / (factor * math.sqrt(global_squared_norm) + 1e-6)
            scale = factor * min(1.0, limit)
            if scale != 1.0:
                for gradient in local_gradients(self._parameters.values()):
                    gradient.mul_(scale)
            for group in self._adam.param_groups:
                group["lr"] = self.next_rate
            self._adam.step()
            self.updates += 1
        self.discard()
        return finite

    def discard(self) -> None:
        """Forget the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The moments by name, for a checkpoint; loading writes into these very tensors."""
        return {
            f"{moment}.{name}": self._adam.state[parameter][moment]
            for name, parameter in self._parameters.items()
            for moment in _MOMENTS
        }

    def restore_updates(self, updates: int) -> None:
        """Continue the schedule and the bias correction after `updates` updates."""
        self.updates = updates
        for parameter in self._parameters.values():
            self._adam.state[parameter]["step"].fill_(float(updates))
