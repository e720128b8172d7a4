"""The configuration: its schema, and how it is loaded, checked and printed."""

from headrace.engine.config.algorithm import (
    AlgorithmConfig,
    GaeConfig,
    ImportanceConfig,
    KlConfig,
    ShapingConfig,
)
from headrace.engine.config.loader import check_config, load_config, read_config
from headrace.engine.config.render import describe_schema, effective_toml
from headrace.engine.config.schema import (
    BufferConfig,
    Config,
    DataConfig,
    EvalConfig,
    LearnerConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    ScheduleConfig,
    TimeoutConfig,
    WeightsConfig,
)

__all__ = [
    "AlgorithmConfig",
    "BufferConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "GaeConfig",
    "ImportanceConfig",
    "KlConfig",
    "LearnerConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "ScheduleConfig",
    "ShapingConfig",
    "TimeoutConfig",
    "WeightsConfig",
    "check_config",
    "describe_schema",
    "effective_toml",
    "load_config",
    "read_config",
]
