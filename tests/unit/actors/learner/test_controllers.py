import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.controllers import AdaptiveKl, Bounds, KlLearningRate
from headrace.engine.errors import ConfigError, InputError

anything = st.floats(allow_nan=True, allow_infinity=True)


def test_the_kl_coefficient_follows_the_papers_rule() -> None:
    """arXiv 1909.08593, section 2.2, with its gain of 0.1 (a horizon of 50), worked out by hand."""
    controller = AdaptiveKl(initial=0.2, target=0.1, horizon=50)
    assert controller.update(0.11) == pytest.approx(0.2 * (1 + 0.1 * 0.1))  # 10% too far
    assert controller.update(0.11) == pytest.approx(0.2 * 1.01**2)
    assert controller.update(5.0) == pytest.approx(0.2 * 1.01**2 * (1 + 0.1 * 0.2))  # saturates at 20%
    assert controller.update(-5.0) == pytest.approx(0.2 * 1.01**2 * 1.02 * 0.98)
    assert controller.update(0.1) == controller.coef == pytest.approx(0.2 * 1.01**2 * 1.02 * 0.98)


def test_a_saturated_error_changes_the_coefficient_by_e_within_the_horizon() -> None:
    up, down = (AdaptiveKl(initial=1.0, target=0.1, horizon=1000) for _ in range(2))
    for _ in range(1000):
        up.update(100.0)
        down.update(0.0)
    assert up.coef == pytest.approx(math.e, rel=1e-3)
    assert down.coef == pytest.approx(1 / math.e, rel=1e-3)


@pytest.mark.parametrize("initial", [1e-3, 0.2, 30.0])
def test_the_kl_converges_to_its_target(initial: float) -> None:
    """A policy that drifts in inverse proportion to the coefficient: 0.01 nats at a coefficient of 0.5."""
    controller = AdaptiveKl(initial=initial, target=0.01, horizon=20)
    for _ in range(400):
        controller.update(0.005 / controller.coef)
    assert 0.005 / controller.coef == pytest.approx(0.01, rel=0.02)


@settings(max_examples=40, deadline=None)
@given(st.lists(anything, max_size=60), st.integers(1, 5))
def test_the_coefficient_stays_within_its_bounds(measured: list[float], horizon: int) -> None:
    bounds = Bounds(low=0.05, high=0.4)
    controller = AdaptiveKl(initial=0.1, target=0.1, horizon=horizon, bounds=bounds)
    for kl in measured:
        before = controller.coef
        after = controller.update(kl)
        assert bounds.low <= after <= bounds.high
        if not math.isfinite(kl):
            assert after == before


def test_a_coefficient_at_its_lower_bound_can_rise_again() -> None:
    controller = AdaptiveKl(initial=1e-6, target=0.1, horizon=1)
    controller.update(0.0)
    assert controller.coef == 1e-6
    assert controller.update(1.0) == pytest.approx(2e-6)


def test_the_rate_falls_above_the_band_rises_below_it_and_stays_within() -> None:
    controller = KlLearningRate(initial=1e-5, target=0.01, band=2.0, factor=1.5)
    assert controller.update(0.021) == pytest.approx(1e-5 / 1.5)
    assert controller.update(0.0049) == pytest.approx(1e-5)
    for within in (0.005, 0.01, 0.02):
        assert controller.update(within) == pytest.approx(1e-5)
    assert controller.update(-0.3) == controller.rate == pytest.approx(1.5e-5)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("initial", [1e-7, 1e-5, 9e-4])
def test_the_rate_finds_the_band_and_stays_there(initial: float, power: int) -> None:
    """A policy that moves in proportion to the rate, or to its square: the target at a rate of 2e-5."""
    controller = KlLearningRate(initial=initial, target=0.01, band=1.5, factor=1.5)
    rates = [controller.update(0.01 * (controller.rate / 2e-5) ** power) for _ in range(60)]
    assert rates[-1] == rates[-20]
    assert 0.01 / 1.5 <= 0.01 * (rates[-1] / 2e-5) ** power <= 0.01 * 1.5


@settings(max_examples=40, deadline=None)
@given(st.lists(anything, max_size=60))
def test_the_rate_stays_within_its_bounds_and_moves_by_the_factor_at_most(measured: list[float]) -> None:
    bounds = Bounds(low=1e-6, high=1e-5)
    controller = KlLearningRate(initial=2e-6, target=0.01, bounds=bounds)
    for kl in measured:
        before = controller.rate
        after = controller.update(kl)
        assert bounds.low <= after <= bounds.high
        assert before / 1.5 * 0.999 <= after <= before * 1.5 * 1.001
        if not math.isfinite(kl):
            assert after == before


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-1, 1), max_size=10), st.lists(st.floats(-1, 1), max_size=10))
def test_restored_controllers_go_on_as_the_old_ones(earlier: list[float], later: list[float]) -> None:
    old, new = (AdaptiveKl(initial=0.1, target=0.05, horizon=10) for _ in range(2))
    old_rate, new_rate = (KlLearningRate(initial=1e-6, target=0.05) for _ in range(2))
    for kl in earlier:
        old.update(kl)
        old_rate.update(kl)
    new.restore(old.state())
    new_rate.restore(old_rate.state())
    for kl in later:
        assert new.update(kl) == old.update(kl)
        assert new_rate.update(kl) == old_rate.update(kl)
    assert (new.state(), new_rate.state()) == (old.state(), old_rate.state())


def test_a_restored_value_outside_new_bounds_is_brought_within() -> None:
    controller = AdaptiveKl(initial=0.1, target=0.1, horizon=10, bounds=Bounds(low=0.1, high=0.2))
    controller.restore(5.0)
    assert controller.coef == 0.2


@pytest.mark.parametrize("state", [0.0, -1.0, float("nan"), float("inf")])
def test_a_saved_value_that_is_no_positive_number_is_refused(state: float) -> None:
    with pytest.raises(InputError, match="must be a positive number"):
        AdaptiveKl(initial=0.1, target=0.1, horizon=10).restore(state)
    with pytest.raises(InputError, match="must be a positive number"):
        KlLearningRate(initial=1e-6, target=0.1).restore(state)


@pytest.mark.parametrize(
    "change", [{"initial": 0.0}, {"initial": 1e9}, {"target": 0.0}, {"target": math.inf}, {"horizon": 0}]
)
def test_a_kl_controller_that_cannot_work_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        AdaptiveKl(**{"initial": 0.1, "target": 0.1, "horizon": 10, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change", [{"initial": 1.0}, {"target": 0.0}, {"band": 1.0}, {"factor": 1.0}, {"factor": 2.5}, {"band": math.inf}]
)
def test_a_rate_controller_that_cannot_work_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        KlLearningRate(**{"initial": 1e-6, "target": 0.1, **change})


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.0, 1.0), (1.0, math.inf), (math.nan, 1.0)])
def test_bounds_that_are_no_range_are_refused(low: float, high: float) -> None:
    with pytest.raises(ConfigError, match="0 < low <= high"):
        Bounds(low=low, high=high)


def test_one_measurement_at_most_halves_or_doubles_the_coefficient() -> None:
    """With the shortest horizon the paper's factor would be 0: one step near the reference would switch the KL off."""
    controller = AdaptiveKl(initial=0.1, target=0.1, horizon=1)
    assert controller.update(0.0) == pytest.approx(0.05)
    assert controller.update(1e9) == pytest.approx(0.1)
