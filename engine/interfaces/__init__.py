"""The roles of a run, each a small Protocol.

For each role there are implementations that run in-process, one gRPC client that implements the same Protocol and one
servicer that exposes any implementation, so a role moves out of the process by a change of address.

Asynchronous methods that wait say so; cancelling the awaiting task withdraws the request and leaves the role usable.
"""

from headrace.engine.interfaces.data import Environment, EnvironmentStep, PromptSource, Sampler, TableView
from headrace.engine.interfaces.inference import InferenceBackend, Reward, TokenScorer
from headrace.engine.interfaces.learning import (
    Algorithm,
    GroupRewards,
    LossInputs,
    LossOutput,
    OverlappedTrainer,
    StagedUpdate,
    TrainerBackend,
)

__all__ = [
    "Algorithm",
    "Environment",
    "EnvironmentStep",
    "GroupRewards",
    "InferenceBackend",
    "LossInputs",
    "LossOutput",
    "OverlappedTrainer",
    "PromptSource",
    "Reward",
    "Sampler",
    "StagedUpdate",
    "TableView",
    "TokenScorer",
    "TrainerBackend",
]
