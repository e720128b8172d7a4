"""Which backend a run gets, and why."""

import importlib.util
from pathlib import Path
from typing import Literal

import pytest

from headrace.actors.rollout.backends import choose_backend, create_backend
from headrace.actors.rollout.transformers_backend import TransformersBackend
from headrace.actors.tiny import build_tiny_model
from headrace.engine.config.schema import Config, ModelConfig, RolloutConfig
from headrace.engine.errors import ConfigError
from headrace.engine.interfaces import InferenceBackend
from headrace.engine.types import PolicyVersion

Name = Literal["scripted", "transformers"]
VERSION = PolicyVersion(1, 3)


def test_a_named_backend_is_taken_as_it_is() -> None:
    assert choose_backend(Config(rollout=RolloutConfig(backend="scripted"))) == (
        "scripted",
        "rollout.backend is scripted",
    )


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed; tests/e2e has that case")
def test_without_vllm_auto_takes_transformers_and_vllm_is_refused() -> None:
    assert choose_backend(Config()) == ("transformers", "rollout.backend is auto, and vLLM is not installed")
    with pytest.raises(ConfigError, match=r"install headrace\[vllm\]"):
        choose_backend(Config(rollout=RolloutConfig(backend="vllm")))


async def test_a_created_backend_serves_the_given_version(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    build_tiny_model(tmp_path)
    kinds: tuple[tuple[Name, type], ...] = (("scripted", InferenceBackend), ("transformers", TransformersBackend))
    for name, kind in kinds:
        rollout = RolloutConfig(backend=name)
        backend = create_backend(Config(rollout=rollout, model=ModelConfig(max_context_tokens=64)), tmp_path, VERSION)
        assert isinstance(backend, kind)
        assert (await backend.state()).policy_version == VERSION
        assert f"Sampling with {name} (rollout.backend is {name})." in caplog.messages
