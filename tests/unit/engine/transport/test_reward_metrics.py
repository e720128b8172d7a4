import logging

import pytest

from headrace.engine.transport.reward_metrics import MAX_NAMES, MetricNames


def test_names_are_kept_up_to_their_number_and_the_first_to_come_stay(caplog: pytest.LogCaptureFixture) -> None:
    names = MetricNames("reward server x")
    with caplog.at_level(logging.WARNING):
        for sample in range(1000):
            kept = names.keep({"format": 1.0, f"sample-{sample}": 2.0})
            assert kept["format"] == 1.0
            assert len(kept) == (2 if sample < MAX_NAMES - 1 else 1)
    assert names.keep({"sample-3": 4.0}) == {"sample-3": 4.0}
    (record,) = caplog.records
    assert "reward server x" in record.getMessage() and "'sample-63'" in record.getMessage()


@pytest.mark.parametrize("name", ["", "x" * 65, "two words", "line\nfeed", "été", "a" * 1_000_000])
def test_a_name_of_other_characters_or_too_long_is_left_out(name: str) -> None:
    assert MetricNames("x").keep({name: 1.0, "good/name@1": 2.0}) == {"good/name@1": 2.0}


@pytest.mark.parametrize("name", ["failed", "latency_s", "avg@1"])
def test_a_name_that_the_hub_has_for_itself_is_told_apart(name: str) -> None:
    assert MetricNames("x").keep({name: 1.0}) == {f"scorer_{name}": 1.0}
