"""Headrace: an embeddable asynchronous actor runtime for RL post-training of language models.

Importing this package pulls in neither torch nor vLLM; names are loaded when they are first used.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.clients.engine import Engine as Engine
    from headrace.engine.config import Config as Config
    from headrace.engine.config import load_config as load_config
    from headrace.engine.errors import HeadraceError as HeadraceError

try:
    __version__ = version("headrace")
except PackageNotFoundError:  # run from a tree that was never installed
    __version__ = "0.0.0"

_HOMES = {
    "Config": "headrace.engine.config",
    "Engine": "headrace.clients.engine",
    "HeadraceError": "headrace.engine.errors",
    "load_config": "headrace.engine.config",
}

__all__ = ["Config", "Engine", "HeadraceError", "__version__", "load_config"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
