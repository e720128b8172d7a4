import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points

import numpy as np
import numpy.typing as npt
import pytest

from headrace.actors.learner.algorithms.grpo import Grpo
from headrace.engine.config import AlgorithmConfig
from headrace.engine.errors import InputError
from headrace.engine.interfaces import Algorithm


@dataclass(frozen=True)
class Group:
    group_id: str
    rewards: npt.NDArray[np.float64]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.ones(len(self.rewards), dtype=np.int64)


def test_grpo_is_an_algorithm_found_by_its_entry_point() -> None:
    (found,) = entry_points(group="headrace.algorithms", name="grpo")
    assert found.load() is Grpo
    assert isinstance(Grpo(AlgorithmConfig()), Algorithm)


def test_credit_is_given_group_by_group_in_order() -> None:
    groups = [Group("a", np.array([1.0, 0.0])), Group("b", np.full(3, 0.1))]
    first, second = Grpo(AlgorithmConfig()).assign_credit(groups)
    assert first == pytest.approx([0.707107, -0.707107], abs=1e-6)
    assert second.tolist() == [0.0, 0.0, 0.0]
    (centred,) = Grpo(AlgorithmConfig(normalize_std=False)).assign_credit(groups[:1])
    assert centred.tolist() == [0.5, -0.5]


def test_a_bad_reward_names_its_group() -> None:
    with pytest.raises(InputError, match="group 'a'"):
        Grpo(AlgorithmConfig()).assign_credit([Group("a", np.array([1.0, np.nan]))])


def test_credit_needs_no_torch() -> None:
    program = (
        "import sys; from headrace.actors.learner.algorithms.grpo import Grpo\n"
        "from headrace.engine.config import AlgorithmConfig\n"
        "Grpo(AlgorithmConfig()).assign_credit([]); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "False"
