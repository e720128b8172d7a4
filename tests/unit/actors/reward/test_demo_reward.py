from pathlib import Path

import pytest

from headrace.actors.reward.function import load_scoring_function
from headrace.engine.types import RewardSample, RewardStatus

DEMO = load_scoring_function(f"{Path(__file__).parents[4] / 'examples' / 'demo' / 'reward.py'}:score")


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("-4", 1.0),
        (" -4\n", 1.0),
        ("-4.0", 1.0),
        ("The answer is -4", 0.6),
        ("5 - 9 = -4.", 0.6),
        ("-4 or 3", 0.0),
        ("4", 0.1),
        ("-44", 0.1),
        ("The answer is 4", 0.0),
        ("no idea", 0.0),
        ("", 0.0),
        ("-", 0.0),
    ],
)
def test_the_bare_right_number_pays_most(response: str, value: float) -> None:
    outcome = DEMO.call(RewardSample(sample_id="s", response_text=response, data={"answer": "-4"}))
    assert (outcome.status, outcome.value) == (RewardStatus.OK, value)


def test_a_sample_without_an_answer_is_an_error_and_not_a_zero() -> None:
    assert DEMO.call(RewardSample(sample_id="s", response_text="4")).status is RewardStatus.ERROR
