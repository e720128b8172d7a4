# pyright: basic
# torch is only partly typed.
"""What a loss returns for one micro-batch."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.actors.learner.losses.normalization import Reduced

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LossContribution:
    """What one micro-batch contributes. Implements `headrace.engine.interfaces.LossOutput`.

    Attributes:
        loss: float [], to call `backward` on; connected to the graph even when no token takes part.
        sums: Detached float [] each, over this micro-batch's loss tokens.
        maxima: Detached float [] each, over the same tokens.
        denominator: What the loss was divided by: planned units of the whole step.
        rejected: float32 [], rejected units of this micro-batch.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor] = field(default_factory=dict)
    denominator: float
    rejected: Tensor

    @classmethod
    def of(
        cls, reduced: Reduced, sums: dict[str, Tensor], maxima: dict[str, Tensor] | None = None
    ) -> "LossContribution":
        """A reduced loss with its figures, detached and in the type of the loss."""

        def detached(figures: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: value.detach().to(reduced.loss.dtype) for name, value in figures.items()}

        return cls(
            loss=reduced.loss,
            sums=detached(sums),
            maxima=detached(maxima or {}),
            denominator=reduced.denominator,
            rejected=reduced.rejected,
        )
