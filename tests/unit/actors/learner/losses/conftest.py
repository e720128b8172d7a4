"""Random ragged micro-batches for tests of losses, as plain arrays, and the same packed as a loss sees them.

Masked tokens carry NaN in every column, so that a loss that looks at one cannot pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.learner.loss_inputs import TensorLossInputs

COLUMNS = ("current", "proximal", "behaviour", "reference", "teacher", "entropy", "advantages")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sequence: float64 [T] columns, bool [T] mask, and the group that it belongs to."""

    current: np.ndarray
    proximal: np.ndarray
    behaviour: np.ndarray
    reference: np.ndarray
    teacher: np.ndarray
    entropy: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray
    group: int

    def tokens(self) -> list[int]:
        """Positions of the loss tokens."""
        return [t for t in range(len(self.mask)) if self.mask[t]]

    def with_masked(self, *, front: int = 0, back: int = 0) -> "Sample":
        """The same with masked tokens put around it."""
        columns = {
            name: np.concatenate([np.full(front, np.nan), getattr(self, name), np.full(back, np.nan)])
            for name in COLUMNS
        }
        mask = np.concatenate([np.zeros(front, bool), self.mask, np.zeros(back, bool)])
        return replace(self, mask=mask, **columns)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a loss gave: the value, gradients [T] of each sample's tokens, and the rest."""

    loss: float
    gradients: list[np.ndarray]
    rejected: float
    denominator: float
    sums: dict[str, float]
    maxima: dict[str, float]

    @property
    def factor(self) -> float:
        """What a trainer multiplies by, over a whole step."""
        left = self.denominator - self.rejected
        return self.denominator / left if left > 0 else 0.0


class LossKit:
    """Draws samples, packs them, and runs losses over them."""

    @staticmethod
    def draw(seed: int, *, spread: float = 0.5, scalar_credit: bool = False, pairs: bool = False) -> list[Sample]:
        """One to five sequences (or as many pairs) of ragged length; some without a loss token, unless paired."""
        rng = np.random.default_rng(seed)
        number = int(rng.integers(1, 6))
        return [
            LossKit._sample(rng, group, spread, scalar_credit, sign)
            for group in range(number)
            for sign in ((1.0, -1.0) if pairs else (0.0,))
        ]

    @staticmethod
    def _sample(rng: np.random.Generator, group: int, spread: float, scalar_credit: bool, sign: float) -> Sample:
        length = int(rng.integers(2, 8))
        mask = rng.random(length) < 0.7
        mask[0] = False  # the first token of a sequence has no score
        mask[1] = mask[1] or sign != 0
        base = -rng.exponential(1.5, length)
        columns = {name: base + rng.normal(0.0, spread, length) for name in COLUMNS[:5]}
        credit = np.full(length, rng.normal()) if scalar_credit else rng.normal(size=length)
        columns |= {"entropy": rng.exponential(1.0, length), "advantages": np.full(length, sign) if sign else credit}
        return Sample(mask=mask, group=group, **{name: np.where(mask, c, np.nan) for name, c in columns.items()})

    @staticmethod
    def counts(samples: Sequence[Sample]) -> dict[str, int]:
        """The step's counts, if these are all of its samples."""
        return {
            "num_loss_tokens": int(sum(s.mask.sum() for s in samples)),
            "num_sequences": sum(bool(s.mask.any()) for s in samples),
            "num_groups": len({s.group for s in samples}),
        }

    @staticmethod
    def pack(
        samples: Sequence[Sample], *, kl_coef: float = 0.0, counts: dict[str, int] | None = None, **changed: Any
    ) -> TensorLossInputs:
        """The samples end to end, float64; `logprobs` and `entropy` are leaves."""

        def column(name: str) -> torch.Tensor:
            return torch.tensor(np.concatenate([np.zeros(0), *(getattr(s, name) for s in samples)]))

        groups: dict[int, int] = {}
        values: dict[str, Any] = {
            "logprobs": column("current").requires_grad_(),
            "proximal_logprobs": column("proximal"),
            "behaviour_logprobs": column("behaviour"),
            "reference_logprobs": column("reference"),
            "teacher_logprobs": column("teacher"),
            "entropy": column("entropy").requires_grad_(),
            "advantages": column("advantages"),
            "loss_mask": column("mask").bool(),
            "sequence_ids": torch.tensor([i for i, s in enumerate(samples) for _ in s.mask], dtype=torch.int64),
            "group_ids": torch.tensor([groups.setdefault(s.group, len(groups)) for s in samples], dtype=torch.int64),
            "kl_coef": kl_coef,
            **(LossKit.counts(samples) if counts is None else counts),
        }
        return TensorLossInputs(**{**values, **changed})

    @staticmethod
    def run(loss: Callable[[Any], Any], samples: Sequence[Sample], *, leaf: str = "logprobs", **given: Any) -> Outcome:
        """One forward and backward pass; gradients of `leaf`."""
        inputs = LossKit.pack(samples, **given)
        output = loss(inputs)
        output.loss.backward()
        gradient = getattr(inputs, leaf).grad
        gradient = np.zeros(sum(len(s.mask) for s in samples)) if gradient is None else gradient.numpy()
        ends = np.cumsum([len(s.mask) for s in samples])[:-1]
        return Outcome(
            loss=output.loss.item(),
            gradients=np.split(gradient, ends) if samples else [],
            rejected=output.rejected.item(),
            denominator=output.denominator,
            sums={name: value.item() for name, value in output.sums.items()},
            maxima={name: value.item() for name, value in output.maxima.items()},
        )

    @staticmethod
    def slopes(
        value: Callable[[list[Sample]], float], samples: Sequence[Sample], *, name: str = "current", step: float = 1e-6
    ) -> list[np.ndarray]:
        """Central differences of `value` in each sample's column, [T] each; 0 on masked tokens."""
        result = []
        for index, sample in enumerate(samples):
            slope = np.zeros(len(sample.mask))
            for t in sample.tokens():
                ends = []
                for sign in (1.0, -1.0):
                    moved = getattr(sample, name).copy()
                    moved[t] += sign * step
                    ends.append(value([*samples[:index], replace(sample, **{name: moved}), *samples[index + 1 :]]))
                slope[t] = (ends[0] - ends[1]) / (2 * step)
            result.append(slope)
        return result

    @staticmethod
    def assert_same(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray], *, atol: float = 1e-7) -> None:
        """Gradients agree, sample by sample."""
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=atol)


assert {f.name for f in fields(Sample)} == {*COLUMNS, "mask", "group"}


@pytest.fixture(scope="session")
def kit() -> type[LossKit]:
    """Draws samples, packs them, and runs losses over them."""
    return LossKit
