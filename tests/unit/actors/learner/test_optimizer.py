"""The learning-rate schedule."""

import pytest

from headrace.actors.learner.optimizer import decay_factor, warmup_rate


def test_the_rate_rises_linearly_and_stays() -> None:
    assert [warmup_rate(1.0, 4, n) for n in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmup_rate(1.0, 0, 0) == 1.0


def test_the_rate_falls_linearly_to_zero_and_no_further() -> None:
    assert [decay_factor(4, n) for n in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


@pytest.mark.parametrize("updates_done", [0, 1, 1000])
def test_without_decay_steps_the_rate_does_not_fall(updates_done: int) -> None:
    assert decay_factor(0, updates_done) == 1.0
