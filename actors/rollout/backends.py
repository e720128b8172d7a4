"""Which inference backend a run gets, and why. Importing this file is light; its functions may import vLLM."""

import importlib
import importlib.util
import logging
from pathlib import Path

from headrace.engine.config.schema import Config
from headrace.engine.errors import ConfigError
from headrace.engine.interfaces import InferenceBackend
from headrace.engine.types import PolicyVersion

_LOG = logging.getLogger(__name__)


def choose_backend(config: Config) -> tuple[str, str]:
    """The name of the backend, and the reason for people: `rollout.backend`, or what "auto" finds.

    Imports vLLM if that may be the answer, which takes seconds: call it in the process that would run it.

    Raises:
        ConfigError: `rollout.backend` is "vllm", which does not import.
    """
    wanted = config.rollout.backend
    problem = _vllm_problem() if wanted in ("auto", "vllm") else ""
    if wanted == "vllm" and problem:
        raise ConfigError(
            f"rollout.backend is vllm, but {problem}; install headrace[vllm] or set rollout.backend to transformers."
        )
    if wanted != "auto":
        return wanted, f"rollout.backend is {wanted}"
    if problem:
        return "transformers", f"rollout.backend is auto, and {problem}"
    return "vllm", "rollout.backend is auto, and vLLM imports"


def create_backend(config: Config, model_dir: Path, version: PolicyVersion) -> InferenceBackend:
    """Make the backend that `choose_backend` names, not started yet. Says in one log line which and why.

    Args:
        config: The run's.
        model_dir: The checkpoint's folder.
        version: What its weights are.

    Raises:
        ConfigError: The backend is not installed, or the folder does not suit it.
    """
    name, reason = choose_backend(config)
    _LOG.info("Sampling with %s (%s).", name, reason)
    if name == "vllm":
        from headrace.actors.rollout.vllm_backend import VllmBackend

        return VllmBackend.from_config(config, model_dir, version=version)
    if name == "transformers":
        from headrace.actors.rollout.transformers_backend import TransformersBackend

        return TransformersBackend.from_config(config, model_dir, version=version)
    from headrace.engine.testing.scripted_inference import ScriptedInferenceBackend

    return ScriptedInferenceBackend(
        max_running=config.rollout.max_num_seqs, max_context_tokens=config.model.max_context_tokens, version=version
    )


def _vllm_problem() -> str:
    """Why vLLM cannot be used, or nothing."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    try:
        importlib.import_module("vllm")
    except (ImportError, OSError, RuntimeError) as error:
        # Built for another torch, or for another machine.
        return f"vLLM does not import ({type(error).__name__}: {error})"
    return ""
