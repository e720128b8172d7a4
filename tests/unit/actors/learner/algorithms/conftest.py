"""Modules beside this file: test files cannot import each other."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def bandit() -> Any:
    """The class `Bandit` of token_bandit.py."""
    _load("table_policy")
    return _load("token_bandit").Bandit


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
