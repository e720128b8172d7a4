"""Batches that are taken while the step before trains."""

import threading

import pytest

from headrace.actors.learner.ahead import BatchesAhead
from headrace.engine.errors import StoppedError

LIMIT_S = 10.0


class Hub:
    """Answers a step once its batch is there; notes what it was asked for."""

    def __init__(self) -> None:
        self.there = [threading.Event() for _ in range(4)]
        self.asked = [threading.Event() for _ in range(4)]
        self.deadlines: dict[int, float] = {}
        self.is_stopped = False

    def take(self, step: int, deadline_s: float) -> str:
        self.deadlines[step] = deadline_s
        self.asked[step].set()
        assert self.there[step].wait(LIMIT_S)
        if self.is_stopped:
            raise StoppedError("the run is ending")
        return f"batch {step}"


def make(hub: Hub, *, ahead: bool, num_steps: int = 3) -> BatchesAhead[str]:
    return BatchesAhead(hub.take, num_steps=num_steps, ahead=ahead, wait_s=1.0, train_s=5.0)


def test_the_next_batch_is_asked_for_as_soon_as_the_current_one_is_handed_out() -> None:
    hub = Hub()
    batches = make(hub, ahead=True)
    hub.there[0].set()
    assert batches.get(0) == "batch 0"
    assert hub.asked[1].wait(LIMIT_S)  # while step 0 would train
    hub.there[1].set()
    assert batches.get(1) == "batch 1"


def test_a_batch_asked_for_ahead_may_take_as_long_as_a_step_trains_on_top() -> None:
    hub = Hub()
    batches = make(hub, ahead=True)
    hub.there[0].set()
    batches.get(0)
    assert hub.asked[1].wait(LIMIT_S)
    assert (hub.deadlines[0], hub.deadlines[1]) == (1.0, 6.0)


def test_on_policy_nothing_is_asked_for_ahead() -> None:
    hub = Hub()
    batches = make(hub, ahead=False)
    for step in range(2):
        hub.there[step].set()
        assert batches.get(step) == f"batch {step}"
        assert list(hub.deadlines) == list(range(step + 1))


def test_nothing_is_asked_for_after_the_last_step() -> None:
    hub = Hub()
    batches = make(hub, ahead=True, num_steps=2)
    for event in hub.there:
        event.set()
    assert [batches.get(step) for step in range(2)] == ["batch 0", "batch 1"]
    assert list(hub.deadlines) == [0, 1]


def test_a_failure_ahead_is_raised_where_its_batch_is_wanted() -> None:
    hub = Hub()
    batches = make(hub, ahead=True)
    hub.there[0].set()
    assert batches.get(0) == "batch 0"
    assert hub.asked[1].wait(LIMIT_S)
    hub.is_stopped = True
    hub.there[1].set()
    with pytest.raises(StoppedError):
        batches.get(1)
