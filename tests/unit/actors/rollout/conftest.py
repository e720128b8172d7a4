"""What the tests of weight updates share."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def fake() -> Any:
    """The module `loaded_model.py` beside this file: test files cannot import each other."""
    spec = importlib.util.spec_from_file_location("loaded_model", Path(__file__).with_name("loaded_model.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
