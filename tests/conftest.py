"""What every test may use. Nothing here starts a process or imports a heavy package."""

import importlib.util
import os

import pytest

# Modules whose absence must not pass unseen: HEADRACE_REQUIRE=vllm,peft.
REQUIRED = frozenset(filter(None, os.environ.get("HEADRACE_REQUIRE", "").split(",")))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`@pytest.mark.needs("vllm")`: skip where the module is missing, fail where it is required."""
    for marker in item.iter_markers("needs"):
        for module in marker.args:
            if importlib.util.find_spec(module) is not None:
                continue
            if module in REQUIRED:
                pytest.fail(f"HEADRACE_REQUIRE names {module}, but it is not installed", pytrace=False)
            pytest.skip(f"{module} is not installed")
