"""Samplers choose distinct positions in the promised order."""

import numpy as np
import pytest

from headrace.buffers.groups import GroupView, ReadyGroup
from headrace.buffers.samplers import SAMPLERS, PrioritizedSampler, sampler_named
from headrace.engine.errors import ConfigError, UsageError
from headrace.engine.interfaces import Sampler, TableView
from headrace.engine.types import PolicyVersion

VERSION = PolicyVersion(0, 9)


def _view(priorities: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)) -> GroupView:
    rows = zip("abcd", (5, 7, 7, 6), (1, 2, 3, 4), (8, 5, 7, 6), priorities, strict=True)
    return GroupView.of(
        [
            ReadyGroup(
                group_id=group,
                attempt=0,
                oldest_version=PolicyVersion(0, version),
                newest_version=PolicyVersion(0, version),
                mean_version=float(version),
                num_tokens=10,
                num_records=1,
                inserted=inserted,
                completed=completed,
                priority=priority,
            )
            for group, version, inserted, completed, priority in rows
        ][::-1]
    )


def _names(name: str, n: int = 4) -> str:
    view = _view()
    positions = sampler_named(name).select(view, n, VERSION, np.random.default_rng(1))
    return "".join(view.group_ids[position] for position in positions)


def test_a_view_is_in_insertion_order() -> None:
    view: TableView = _view()
    assert view.inserted.tolist() == [1, 2, 3, 4]


def test_each_sampler_has_its_order() -> None:
    assert _names("fifo") == "abcd"
    assert _names("freshest") == "cbda"
    assert _names("group_complete") == "bdca"


@pytest.mark.parametrize("name", list(SAMPLERS))
@pytest.mark.parametrize("n", [0, 1, 3, 9])
def test_every_sampler_chooses_up_to_n_distinct_items(name: str, n: int) -> None:
    chosen = _names(name, n)
    assert len(chosen) == len(set(chosen)) == min(n, 4)


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_every_sampler_takes_an_empty_view_and_repeats_itself_for_a_seed(name: str) -> None:
    sampler: Sampler = sampler_named(name)
    assert sampler.select(GroupView.of([]), 3, VERSION, np.random.default_rng(0)) == []
    first, second = (sampler.select(_view(), 3, VERSION, np.random.default_rng(5)) for _ in range(2))
    assert first == second


def test_prioritized_sampling_is_proportional() -> None:
    rng = np.random.default_rng(7)
    view = _view((4.0, 3.0, 2.0, 1.0))
    counts = np.zeros(4)
    for _ in range(8000):
        counts[PrioritizedSampler(alpha=1.0).select(view, 1, VERSION, rng)[0]] += 1
    assert counts / 8000 == pytest.approx([0.4, 0.3, 0.2, 0.1], abs=0.02)


def test_a_priority_of_zero_comes_last_and_a_negative_one_is_refused() -> None:
    rng = np.random.default_rng(7)
    for _ in range(50):
        assert PrioritizedSampler().select(_view((0.0, 1.0, 1.0, 1.0)), 4, VERSION, rng)[-1] == 0
    with pytest.raises(UsageError, match="negative"):
        PrioritizedSampler().select(_view((-1.0, 1.0, 1.0, 1.0)), 1, VERSION, rng)
    with pytest.raises(UsageError, match="alpha"):
        PrioritizedSampler(alpha=2.0)


def test_a_misspelt_sampler_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'uniform'"):
        sampler_named("unifrom")
