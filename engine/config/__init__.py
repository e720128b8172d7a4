"""The configuration: its schema, and how it is loaded, checked and printed."""

from headrace.engine.config.loader import check_config, load_config, read_config
from headrace.engine.config.render import describe_schema, effective_toml
from headrace.engine.config.schema import (
    AlgorithmConfig,
    BufferConfig,
    Config,
    DataConfig,
    EvalConfig,
    ImportanceConfig,
    LearnerConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    ScheduleConfig,
    TimeoutConfig,
)

__all__ = [
    "AlgorithmConfig",
    "BufferConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "ImportanceConfig",
    "LearnerConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "ScheduleConfig",
    "TimeoutConfig",
    "check_config",
    "describe_schema",
    "effective_toml",
    "load_config",
    "read_config",
]
