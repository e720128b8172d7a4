import math

import numpy as np
import pytest

from headrace.actors.reward.normalise import MAX_MESSAGE_CHARS, normalise_result
from headrace.engine.types import RewardOutcome, RewardStatus

OK, ERROR, ABSTAIN = RewardStatus.OK, RewardStatus.ERROR, RewardStatus.ABSTAIN


@pytest.mark.parametrize(
    ("result", "status", "value"),
    [
        (True, OK, 1.0),
        (False, OK, 0.0),
        (1, OK, 1.0),
        (-2.5, OK, -2.5),
        (np.float32(0.5), OK, 0.5),
        (np.float16(0.5), OK, 0.5),
        (np.int64(3), OK, 3.0),
        (np.bool_(True), OK, 1.0),
        (np.array(0.25), OK, 0.25),
        ({"reward": 1, "format": 0.5}, OK, 1.0),
        ({"reward": None}, ABSTAIN, 0.0),
        (None, ABSTAIN, 0.0),
        ("0.5", ERROR, 0.0),
        (b"1", ERROR, 0.0),
        (math.nan, ERROR, 0.0),
        (math.inf, ERROR, 0.0),
        (np.float32("nan"), ERROR, 0.0),
        (10**400, ERROR, 0.0),
        (1j, ERROR, 0.0),
        ([1.0], ERROR, 0.0),
        (np.array([1.0]), ERROR, 0.0),
        ({"score": 1.0}, ERROR, 0.0),
        ({"reward": {"reward": 1.0}}, ERROR, 0.0),
        ({"reward": "1"}, ERROR, 0.0),
        (object(), ERROR, 0.0),
    ],
)
def test_reward_type_each_result_becomes_a_typed_outcome(result: object, status: RewardStatus, value: float) -> None:
    outcome = normalise_result(result, sample_id="g/1/0", scorer="pkg:score")
    assert (outcome.status, outcome.value, outcome.sample_id) == (status, value, "g/1/0")
    assert type(outcome.value) is float
    if status is not OK:
        assert "pkg:score" in outcome.message and "g/1/0" in outcome.message


def test_reward_type_extras_of_a_dict_become_metrics_where_they_are_finite_numbers() -> None:
    result = {"reward": 0.5, "format": True, "penalty": np.float32(0.25), "note": "fine", "ratio": math.nan}
    outcome = normalise_result(result, sample_id="s", scorer="f")
    assert outcome.metrics == {"format": 1.0, "penalty": 0.25}


def test_an_outcome_of_the_scorer_keeps_its_verdict_and_gets_the_id_of_the_sample() -> None:
    given = RewardOutcome(sample_id="other", status=ABSTAIN, message="out of scope", metrics={"seen": 1.0})
    outcome = normalise_result(given, sample_id="s", scorer="f")
    assert outcome == RewardOutcome(sample_id="s", status=ABSTAIN, message="out of scope", metrics={"seen": 1.0})


def test_an_outcome_of_the_scorer_with_a_nan_value_is_an_error() -> None:
    given = RewardOutcome(sample_id="s", status=OK, value=math.nan)
    assert normalise_result(given, sample_id="s", scorer="f").status is ERROR


def test_a_message_never_grows_without_bound() -> None:
    outcome = normalise_result(
        RewardOutcome(sample_id="s", status=ERROR, message="x" * 10**6), sample_id="s", scorer="f"
    )
    assert len(outcome.message) == MAX_MESSAGE_CHARS
