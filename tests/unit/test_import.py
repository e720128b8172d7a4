"""Importing the package is cheap, and its public names are those that are documented."""

import subprocess
import sys

import headrace

LIGHT = ["headrace", "headrace.engine.config", "headrace.engine.interfaces", "headrace.engine.plugins", "headrace.v1"]


def test_importing_takes_less_than_0_2_s_of_processor_time() -> None:
    program = "import time; start = time.process_time(); import headrace; print(time.process_time() - start)"
    times = [float(subprocess.check_output([sys.executable, "-c", program], text=True)) for _ in range(3)]
    assert min(times) < 0.2


def test_importing_pulls_in_nothing_heavy() -> None:
    program = (
        f"import sys, {', '.join(LIGHT)}; print(sorted({{'torch', 'transformers', 'vllm', 'grpc'}} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_importing_is_without_side_effects() -> None:
    program = """
import asyncio, logging, random, signal, sys, threading
def state():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    loops = type(asyncio.get_event_loop_policy())
    return random.getstate(), handlers, loops, logging.root.handlers[:], logging.root.level, threading.active_count()
before = state()
import headrace, headrace.engine.config
print(before == state())
"""
    out = subprocess.check_output([sys.executable, "-W", "ignore", "-c", program], text=True)
    assert out.strip() == "True"


def test_the_public_names_are_locked() -> None:
    assert headrace.__all__ == ["Config", "Engine", "HeadraceError", "__version__", "load_config"]
    assert dir(headrace) == sorted(headrace.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(headrace, "Enigne")
