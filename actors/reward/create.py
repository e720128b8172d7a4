"""The reward of a run, from its configuration."""

from headrace.actors.reward.pool import RewardPool, create_pool
from headrace.engine.config.schema import Config
from headrace.engine.errors import ConfigError
from headrace.engine.transport.reward import GrpcReward


def create_reward(config: Config) -> RewardPool | GrpcReward:
    """A pool for `reward.function`, a client for `reward.address`; nothing is started or sent yet.

    Both are a `Reward` with a method `start`, which tells what is wrong before the first sample.

    Raises:
        ConfigError: Both are given, or neither.
    """
    reward = config.reward
    if bool(reward.function) == bool(reward.address):
        given = "both are given" if reward.function else "neither is given"
        raise ConfigError(f"set one of reward.function and reward.address; {given}")
    return create_pool(reward) if reward.function else GrpcReward.from_config(reward)
