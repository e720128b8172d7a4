"""Settings that no step could honour are refused where a method is made, before any model is loaded."""

import pytest

from headrace.actors.learner.algorithms.grpo import Grpo
from headrace.engine.config import AlgorithmConfig
from headrace.engine.config.algorithm import ImportanceConfig, KlConfig
from headrace.engine.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            AlgorithmConfig(importance=ImportanceConfig(reject_below=2.0, reject_above=1.5)),
            "algorithm.importance.reject_below = 2 and reject_above = 1.5 leave no sequence .* raise reject_above",
        ),
        (
            AlgorithmConfig(kl_coef=5e3, kl=KlConfig(target=0.1)),
            "algorithm.kl_coef of an adaptive coefficient is 5000.0: it must lie between",
        ),
    ],
)
def test_a_setting_that_no_step_can_honour_is_refused_at_once(config: AlgorithmConfig, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Grpo(config)


def test_one_bound_of_rejection_is_enough() -> None:
    for importance in (ImportanceConfig(reject_below=2.0), ImportanceConfig(reject_above=0.5)):
        assert Grpo(AlgorithmConfig(importance=importance)).config.importance == importance
