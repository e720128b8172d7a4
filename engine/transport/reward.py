"""The reward role over gRPC: a servicer that exposes any `Reward`, and a client that is one."""

from headrace.engine.transport.reward_client import GrpcReward
from headrace.engine.transport.reward_convert import (
    outcome_from_proto,
    outcome_to_proto,
    outcomes_from_reply,
    sample_from_proto,
    sample_to_proto,
)
from headrace.engine.transport.reward_servicer import SERVICE_NAME, RewardServicer, StreamingReward

__all__ = [
    "SERVICE_NAME",
    "GrpcReward",
    "RewardServicer",
    "StreamingReward",
    "outcome_from_proto",
    "outcome_to_proto",
    "outcomes_from_reply",
    "sample_from_proto",
    "sample_to_proto",
]
