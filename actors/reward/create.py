"""The reward of a run, from its configuration."""

from headrace.actors.reward.pool import create_pool
from headrace.engine.config.schema import Config
from headrace.engine.errors import ConfigError
from headrace.engine.interfaces import Reward
from headrace.engine.transport.reward import GrpcReward


def create_reward(config: Config) -> Reward:
    """A pool for `reward.function`, a client for `reward.address`; nothing is started or sent yet.

    Raises:
        ConfigError: Both are given, or neither.
    """
    reward = config.reward
    if bool(reward.function) == bool(reward.address):
        given = "both are given" if reward.function else "neither is given"
        raise ConfigError(f"set one of reward.function and reward.address; {given}")
    return create_pool(reward) if reward.function else GrpcReward.from_config(reward)
