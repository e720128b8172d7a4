"""For those who write a role: a conformance check for each Protocol, scripted backends, fake time.

Plain functions that raise AssertionError with one sentence; no test framework is needed.
"""

from headrace.engine.testing.check_algorithm import check_algorithm
from headrace.engine.testing.check_inference import InferenceCase, check_inference_backend
from headrace.engine.testing.check_prompts import check_environment, check_prompt_source
from headrace.engine.testing.check_sampler import check_sampler
from headrace.engine.testing.check_scoring import check_reward, check_token_scorer
from headrace.engine.testing.check_trainer import check_trainer_backend, make_micro_batch, make_step_batch
from headrace.engine.testing.clock import FakeClock
from headrace.engine.testing.samples import assert_same_trajectory, make_trajectory
from headrace.engine.testing.scripted_inference import ScriptedInferenceBackend
from headrace.engine.testing.scripted_trainer import ScriptedTrainer
from headrace.engine.testing.scripts import FixedLength, LogNormalLengths, constant_script, random_script

__all__ = [
    "FakeClock",
    "FixedLength",
    "InferenceCase",
    "LogNormalLengths",
    "ScriptedInferenceBackend",
    "ScriptedTrainer",
    "assert_same_trajectory",
    "check_algorithm",
    "check_environment",
    "check_inference_backend",
    "check_prompt_source",
    "check_reward",
    "check_sampler",
    "check_token_scorer",
    "check_trainer_backend",
    "constant_script",
    "make_micro_batch",
    "make_step_batch",
    "make_trajectory",
    "random_script",
]
