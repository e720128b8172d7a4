"""Settings that follow from others, filled in where a role needs them."""

import msgspec

from headrace.engine.config.algorithm import AlgorithmConfig
from headrace.engine.config.schema import Config


def algorithm_config(config: Config) -> AlgorithmConfig:
    """The algorithm's section with the run's response limit where a constant of 0 stands for it."""
    algorithm = config.algorithm
    limit = config.rollout.max_tokens
    shaping = msgspec.structs.replace(algorithm.shaping, max_tokens=algorithm.shaping.max_tokens or limit)
    constant = algorithm.length_constant or limit
    return msgspec.structs.replace(algorithm, shaping=shaping, length_constant=constant)
