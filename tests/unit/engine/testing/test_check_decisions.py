"""The checks of algorithms and samplers pass what is right and name what is wrong."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from headrace.engine.errors import InputError
from headrace.engine.interfaces import GroupRewards, LossInputs, LossOutput, TableView
from headrace.engine.testing import check_algorithm, check_sampler
from headrace.engine.types import AlgorithmTraits, MicroBatch, PolicyVersion

Credit = list[npt.NDArray[np.float32]]


class Centred:
    """Reward minus the group's mean."""

    @property
    def traits(self) -> AlgorithmTraits:
        return AlgorithmTraits(min_group_size=2)

    def shape_rewards(self, group: GroupRewards) -> npt.NDArray[np.float64]:
        _refuse_bad(group)
        return group.rewards

    def keeps(self, group: GroupRewards) -> bool:
        return True

    def assign_credit(self, groups: Sequence[GroupRewards]) -> Credit:
        for group in groups:
            _refuse_bad(group)
        return [(group.rewards - group.rewards.mean()).astype(np.float32) for group in groups]

    def token_advantages(self, micro_batch: MicroBatch) -> npt.NDArray[np.float32]:
        return micro_batch.advantages * micro_batch.loss_mask

    def loss(self, inputs: LossInputs) -> LossOutput:
        raise NotImplementedError


def _refuse_bad(group: GroupRewards) -> None:
    if not group.rewards.size or not np.isfinite(group.rewards).all():
        raise InputError(f"group {group.group_id} is empty or has a reward that is not finite")


class Oldest:
    """The items that were inserted first."""

    def select(self, view: TableView, n: int, version: PolicyVersion, rng: np.random.Generator) -> list[int]:
        return [int(position) for position in np.argsort(view.inserted, kind="stable")[:n]]


def test_a_right_algorithm_and_a_right_sampler_conform() -> None:
    check_algorithm(Centred)
    check_sampler(Oldest)


class _Double(Centred):
    def assign_credit(self, groups: Sequence[GroupRewards]) -> Credit:
        return [values.astype(np.float64) for values in super().assign_credit(groups)]  # type: ignore[misc]


class _TakesNaN(Centred):
    def assign_credit(self, groups: Sequence[GroupRewards]) -> Credit:
        return [np.zeros(group.rewards.shape, np.float32) for group in groups]


class _Noisy(Centred):
    def assign_credit(self, groups: Sequence[GroupRewards]) -> Credit:
        noise = np.random.default_rng()
        return [values + noise.random(values.shape, np.float32) for values in super().assign_credit(groups)]


class _GlobalGenerator(Centred):
    def token_advantages(self, micro_batch: MicroBatch) -> npt.NDArray[np.float32]:
        np.random.random()
        return super().token_advantages(micro_batch)


class _LeaksIntoThePrompt(Centred):
    def token_advantages(self, micro_batch: MicroBatch) -> npt.NDArray[np.float32]:
        return np.ones(micro_batch.token_ids.shape, np.float32)


class _ChangesItsTraits(Centred):
    calls = 0

    @property
    def traits(self) -> AlgorithmTraits:
        self.calls += 1
        return AlgorithmTraits(min_group_size=self.calls)


class _ShapesToFloat32(Centred):
    def shape_rewards(self, group: GroupRewards) -> npt.NDArray[np.float64]:
        return super().shape_rewards(group).astype(np.float32)  # type: ignore[return-value]


class _ShapesNaN(Centred):
    def shape_rewards(self, group: GroupRewards) -> npt.NDArray[np.float64]:
        return group.rewards


class _FiltersUnannounced(Centred):
    def keeps(self, group: GroupRewards) -> bool:
        return bool(np.ptp(group.rewards) > 0)


class _FiltersByLength(Centred):
    @property
    def traits(self) -> AlgorithmTraits:
        return AlgorithmTraits(min_group_size=2, filters_groups=True)

    def keeps(self, group: GroupRewards) -> bool:
        return bool(group.lengths.max() < 10)


class _LooksBeyondItsGroup(Centred):
    def assign_credit(self, groups: Sequence[GroupRewards]) -> Credit:
        return [values / np.float32(max(1, len(groups))) for values in super().assign_credit(groups)]


class _CreditsByPosition(Centred):
    def assign_credit(self, groups: Sequence[GroupRewards]) -> Credit:
        return [values * np.arange(len(values), dtype=np.float32) for values in super().assign_credit(groups)]


class _CreditsTheLonely(Centred):
    def assign_credit(self, groups: Sequence[GroupRewards]) -> Credit:
        centred = super().assign_credit(groups)
        return [
            group.rewards.astype(np.float32) if len(group.rewards) == 1 else values
            for group, values in zip(groups, centred, strict=True)
        ]


class _IgnoresAMissingColumn(Centred):
    @property
    def traits(self) -> AlgorithmTraits:
        return AlgorithmTraits(min_group_size=2, columns=("values",))


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (_ChangesItsTraits, "same for the whole run"),
        (_ShapesToFloat32, "must be float64"),
        (_ShapesNaN, "a NaN must raise InputError"),
        (_FiltersUnannounced, "filters_groups is False"),
        (_FiltersByLength, "not by the lengths"),
        (_LooksBeyondItsGroup, "looks beyond a group"),
        (_CreditsByPosition, "must not depend on the order"),
        (_CreditsTheLonely, "must get credit 0"),
        (_IgnoresAMissingColumn, "without values must raise InputError"),
        (_Double, "must be float32"),
        (_TakesNaN, "a NaN must raise InputError; nothing was raised"),
        (_Noisy, "must be pure"),
        (_GlobalGenerator, "global generator"),
        (_LeaksIntoThePrompt, "0 where the loss mask is 0"),
    ],
)
def test_the_check_finds_a_broken_algorithm(broken: type[Centred], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_algorithm(broken)


class _Scalar:
    """As much of a tensor as the check asks for."""

    def __init__(self, value: float, *, requires_grad: bool = False) -> None:
        self.value, self.requires_grad, self.ndim, self.backward_calls = value, requires_grad, 0, 0

    def __float__(self) -> float:
        return self.value

    def detach(self) -> "_Scalar":
        return _Scalar(self.value)

    def backward(self) -> None:
        self.backward_calls += 1


class _Output:
    def __init__(self, loss: Any, sums: dict[str, Any], *, denominator: float = 3.0, rejected: float = 0.0) -> None:
        self.loss, self.sums, self.maxima = loss, sums, {"ratio": _Scalar(1.5)}
        self.denominator: float = denominator
        self.rejected: Any = _Scalar(rejected)


class _WithLoss(Centred):
    def loss(self, inputs: LossInputs) -> LossOutput:
        return _Output(_Scalar(float(inputs.num_loss_tokens), requires_grad=True), {"pg_loss": _Scalar(2.0)})


class _Detached(Centred):
    def loss(self, inputs: LossInputs) -> LossOutput:
        return _Output(_Scalar(1.0), {})


class _HoldsTheGraph(Centred):
    def loss(self, inputs: LossInputs) -> LossOutput:
        loss = _Scalar(1.0, requires_grad=True)
        return _Output(loss, {"pg_loss": loss})


class _RejectsMoreThanThereIs(Centred):
    def loss(self, inputs: LossInputs) -> LossOutput:
        return _Output(_Scalar(1.0, requires_grad=True), {}, rejected=4.0)


class _DividesByNothing(Centred):
    def loss(self, inputs: LossInputs) -> LossOutput:
        return _Output(_Scalar(1.0, requires_grad=True), {}, denominator=0.0)


def test_the_loss_is_checked_where_inputs_are_given() -> None:
    def inputs() -> Any:
        return type("Inputs", (), {"num_loss_tokens": 3})()

    check_algorithm(_WithLoss, make_loss_inputs=inputs)
    with pytest.raises(AssertionError, match="connected to the graph"):
        check_algorithm(_Detached, make_loss_inputs=inputs)
    with pytest.raises(AssertionError, match="must be detached"):
        check_algorithm(_HoldsTheGraph, make_loss_inputs=inputs)
    with pytest.raises(AssertionError, match="between 0 and the denominator"):
        check_algorithm(_RejectsMoreThanThereIs, make_loss_inputs=inputs)
    with pytest.raises(AssertionError, match="denominator must be above 0"):
        check_algorithm(_DividesByNothing, make_loss_inputs=inputs)


class _Repeats(Oldest):
    def select(self, view: TableView, n: int, version: PolicyVersion, rng: np.random.Generator) -> list[int]:
        return [0] * min(n, len(view.inserted))


class _NumpyIntegers(Oldest):
    def select(self, view: TableView, n: int, version: PolicyVersion, rng: np.random.Generator) -> list[int]:
        return list(np.argsort(view.inserted)[:n])


class _OwnGenerator(Oldest):
    def select(self, view: TableView, n: int, version: PolicyVersion, rng: np.random.Generator) -> list[int]:
        return [int(position) for position in np.random.default_rng().permutation(len(view.inserted))[:n]]


class _TooMany(Oldest):
    def select(self, view: TableView, n: int, version: PolicyVersion, rng: np.random.Generator) -> list[int]:
        return list(range(len(view.inserted)))


class _HoldsBack(Oldest):
    def select(self, view: TableView, n: int, version: PolicyVersion, rng: np.random.Generator) -> list[int]:
        return super().select(view, n // 2, version, rng)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (_Repeats, "an item twice"),
        (_NumpyIntegers, "list of int"),
        (_OwnGenerator, "must be pure"),
        (_TooMany, "at most n items"),
        (_HoldsBack, "n items, or all"),
    ],
)
def test_the_check_finds_a_broken_sampler(broken: type[Oldest], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_sampler(broken)


def test_a_sampler_that_may_hold_items_back_says_so() -> None:
    check_sampler(_HoldsBack, takes_all=False)
