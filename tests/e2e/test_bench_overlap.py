"""The overlap benchmark at a small load: the real engine runs, the figures hold together; speed is not tested."""

import asyncio
from collections.abc import Mapping

import pytest

from headrace.clients.cli.benchmarks.overlap import STALENESS, figures, measure
from headrace.clients.cli.benchmarks.overlap_load import Lengths, Load

SMALL = Load(
    groups_per_step=4,
    group_size=2,
    slots=5,
    median_tokens=8,
    max_tokens=96,
    tokens_per_chunk=8,
    tokens_per_s=160.0,
    warm_up_steps=1,
    steps=3,
)
NAMES = {"efficiency", "speedup_over_on_policy", "wasted_tokens"}


def test_the_figures_of_each_setting_are_there_and_hold_together() -> None:
    found = figures(SMALL)
    settings = {f"staleness_{staleness}": staleness for staleness in STALENESS}
    assert set(found) == NAMES | set(settings)
    for name, staleness in settings.items():
        setting = found[name]
        assert isinstance(setting, Mapping)
        figure = {key: value for key, value in setting.items() if isinstance(value, float)}
        assert 0 < figure["efficiency"] <= 1.05
        assert figure["speedup_over_on_policy"] > 0
        assert figure["wasted_tokens"] == 0.0  # the learner waits for a group that would expire
        assert figure["trained_tokens"] == figure["generated_tokens"] > 0
        assert figure["max_lag"] <= staleness
        assert 0 < figure["learner_busy_s"] <= figure["measured_s"] * 1.01
        assert 0 < figure["rollout_busy_s"] <= figure["measured_s"] * 1.01
    headline = found["staleness_4"]
    assert isinstance(headline, Mapping)
    assert all(found[name] == headline[name] for name in NAMES)


async def test_cancelling_a_measurement_ends_the_run() -> None:
    measuring = asyncio.create_task(measure(SMALL, 1))
    await asyncio.wait({measuring}, timeout=0.5)
    measuring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await measuring


def test_every_setting_has_the_same_work_and_the_same_step_time() -> None:
    long, short = (Lengths(SMALL, SMALL.num_prompts(staleness)) for staleness in (4, 0))
    assert long.step_s > 0
    assert Lengths(SMALL, SMALL.num_prompts(4)).step_s == long.step_s
    assert short.tokens.tolist() == long.tokens[: len(short.tokens)].tolist()
