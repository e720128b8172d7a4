"""Rewards and credit of a whole group."""

import numpy as np
import pytest

from headrace.engine.config import RewardConfig
from headrace.engine.errors import RewardError
from headrace.engine.hub.scoring import judge
from headrace.engine.types import RewardOutcome, RewardStatus

OK = RewardOutcome(sample_id="g/0/0", status=RewardStatus.OK, value=0.5)
LATE = RewardOutcome(sample_id="g/1/0", status=RewardStatus.TIMEOUT, message="after 30 s")


def test_a_group_with_all_rewards_is_used_as_it_is() -> None:
    assert judge([OK, OK], RewardConfig()).values == (0.5, 0.5)


@pytest.mark.parametrize("policy", ["requeue", "drop"])
def test_a_missing_reward_is_never_a_silent_zero(policy: str) -> None:
    judgement = judge([OK, LATE], RewardConfig(on_failure=policy))  # type: ignore[arg-type]
    assert judgement.values is None
    assert judgement.failed == 1
    assert judgement.why == "sample g/1/0 got no reward: TIMEOUT after 30 s"


def test_imputing_is_a_named_choice() -> None:
    judgement = judge([OK, LATE], RewardConfig(on_failure="impute", impute_value=-1.0))
    assert judgement.values == (0.5, -1.0)
    assert judgement.failed == 1


def test_fail_names_the_sample_and_the_setting() -> None:
    with pytest.raises(RewardError, match=r"g/1/0 .* reward\.on_failure"):
        judge([OK, LATE], RewardConfig(on_failure="fail"))


def test_values_stay_finite_numbers() -> None:
    values = judge([OK], RewardConfig()).values
    assert values is not None
    assert np.isfinite(values).all()
