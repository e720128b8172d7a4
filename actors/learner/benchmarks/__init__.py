"""`headrace bench learner`: the batch planner and the log-probabilities; each file says what its figures are."""

from importlib.util import find_spec

from headrace.actors.learner.benchmarks import logprobs, plan
from headrace.engine.errors import UsageError
from headrace.engine.plugins import missing_module


def run() -> dict[str, float]:
    """The figures of all parts, measured one after another. Blocks for as long as they take, some minutes on a CPU.

    Raises:
        UsageError: torch is not installed.
        RunError: A measurement in a process of its own failed.
    """
    if find_spec("torch") is None:  # before anything is measured, not in a child process after it
        raise UsageError(f"the benchmark learner {missing_module(ModuleNotFoundError(name='torch'))}")
    planned, scored = plan.figures(), logprobs.figures()
    assert not planned.keys() & scored.keys(), "two parts use one name for a figure"
    return planned | scored
