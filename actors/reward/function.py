"""Scoring functions: found by name, their form told from declaration and signature, called one way."""

import asyncio
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.actors.reward.frames import Form
from headrace.actors.reward.normalise import error_outcome, normalise_result
from headrace.engine.errors import ConfigError
from headrace.engine.plugins import load_object
from headrace.engine.types import RewardOutcome, RewardSample, RewardStatus

# A script given as file.py:function runs under this name, so that its `if __name__ == "__main__"` part does not.
SCRIPT_MODULE = "__headrace_scorer__"


class ScoringFunction:
    """A user's function behind one calling convention.

    The form is "batch" when the function (or callable object) has an attribute `batch` that is true, "async" for a
    coroutine function, else "sync". A function with one required parameter gets a `RewardSample`; one with the
    parameters `prompt`, `response` and optionally `data` (by these names, or three positional ones) gets
    the texts and the prompt's data.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """Look at the signature only; nothing is called.

        Raises:
            ConfigError: The function takes neither one parameter nor (prompt, response, data).
        """
        self.name = name
        self._function = function
        call = function if inspect.isroutine(function) else getattr(type(function), "__call__", function)  # noqa: B004
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
        self._is_async = is_async
        self.form: Form = "batch" if getattr(function, "batch", False) else "async" if is_async else "sync"
        self._num_texts = _count_texts(function, name)
        if self.form == "batch" and self._num_texts:
            raise ConfigError(
                f"reward.function {name!r} is declared batch = True and takes (prompt, response, ...); "
                "a batch function takes one list of RewardSample"
            )

    def call(self, sample: RewardSample) -> RewardOutcome:
        """Score one sample with a plain function; what it raises becomes an ERROR outcome."""
        try:
            return self._normalise(self._function(*self._arguments(sample)), sample)
        except (Exception, SystemExit) as error:  # recorded: the outcome carries it
            return self._failure(sample, error)

    async def call_async(self, sample: RewardSample, timeout_s: float) -> RewardOutcome:
        """Score one sample with a coroutine function; it is cancelled after `timeout_s`."""
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                result = await self._function(*self._arguments(sample))
            return self._normalise(result, sample)
        except (Exception, SystemExit) as error:  # recorded: the outcome carries it
            if isinstance(error, TimeoutError) and limit.expired():
                return timeout_outcome(self.name, sample.sample_id, timeout_s)
            return self._failure(sample, error)

    def call_batch(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        """Score a whole batch; a failure, or a list of the wrong length, is an ERROR for each of its samples."""
        try:
            results = self._function(list(samples))
            if inspect.isawaitable(results):
                results = asyncio.run(_await(results))
            results = list(results)
        except (Exception, SystemExit) as error:  # recorded: the outcomes carry it
            return [self._failure(sample, error) for sample in samples]
        if len(results) != len(samples):
            message = (
                f"batch scorer {self.name!r} returned {len(results)} results for {len(samples)} samples; "
                "it must return one a sample, in order"
            )
            return [error_outcome(sample.sample_id, f"{message} (sample {sample.sample_id!r})") for sample in samples]
        return [self._normalise(result, sample) for result, sample in zip(results, samples, strict=True)]

    def _arguments(self, sample: RewardSample) -> tuple[Any, ...]:
        if self._num_texts == 0:
            return (sample,)
        return (sample.prompt_text, sample.response_text, sample.data)[: self._num_texts]

    def _normalise(self, result: object, sample: RewardSample) -> RewardOutcome:
        return normalise_result(result, sample_id=sample.sample_id, scorer=self.name)

    def _failure(self, sample: RewardSample, error: BaseException) -> RewardOutcome:
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if len(frames) > 1 else ""
        what = f"{type(error).__name__}: {error}"
        return error_outcome(
            sample.sample_id, f"scorer {self.name!r} failed on sample {sample.sample_id!r}: {what}{place}"
        )


def timeout_outcome(scorer: str, sample_id: str, timeout_s: float) -> RewardOutcome:
    """The TIMEOUT outcome of a sample that got no answer in time."""
    return RewardOutcome(
        sample_id=sample_id,
        status=RewardStatus.TIMEOUT,
        message=f"scorer {scorer!r} gave no answer for sample {sample_id!r} within {timeout_s:g} s",
    )


def load_scoring_function(spec: str) -> ScoringFunction:
    """Import `module:function` or `file.py:function`; this runs the module's code.

    Raises:
        ConfigError: There is no such module, file or function, importing it failed, or it has an unusable signature.
    """
    try:
        found = _load_from_file(spec) if _is_file_spec(spec) else load_object(spec)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"reward.function {spec!r} cannot be imported ({type(error).__name__}: {error}); "
            "give module:function or file.py:function"
        ) from error
    if not callable(found):
        raise ConfigError(f"reward.function {spec!r} is a {type(found).__name__}; give something that can be called")
    return ScoringFunction(found, spec)


def check_scoring_function(spec: str) -> None:
    """Look for the file or the top-level module of a scoring function; runs no code of it.

    Raises:
        ConfigError: There is none.
    """
    place = spec.rpartition(":")[0]
    if _is_file_spec(spec):
        if not Path(place).is_file():
            raise ConfigError(f"reward.function = {spec!r}: there is no file {place!r}; correct the path")
        return
    if not _is_importable(place.partition(".")[0]):
        raise ConfigError(
            f"reward.function = {spec!r}: there is no module {place!r}; start the command in the folder that holds it, "
            "or install it, or give file.py:function"
        )


async def _await(results: Any) -> Any:
    return await results


def _is_importable(package: str) -> bool:
    """Whether a process that we start could import this top-level package; it has a path of its own."""
    if not package.isidentifier():
        return False
    if package in sys.modules or importlib.util.find_spec(package) is not None:
        return True
    folders = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return importlib.machinery.PathFinder.find_spec(package, [folder for folder in folders if folder]) is not None


def _is_file_spec(spec: str) -> bool:
    return spec.rpartition(":")[0].endswith(".py")


def _load_from_file(spec: str) -> object:
    file, _, attribute = spec.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"there is no file {file!r}")
    module_spec = importlib.util.spec_from_file_location(SCRIPT_MODULE, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[SCRIPT_MODULE] = module
    sys.path.append(str(path.resolve().parent))  # its neighbours, as if it were run as a script
    module_spec.loader.exec_module(module)
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{file!r} defines no {attribute!r}")
        found = getattr(found, part)
    return found


def _count_texts(function: Callable[..., Any], name: str) -> int:
    """0 when the function takes a RewardSample, else how many of (prompt, response, data) it takes."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature: taken to want a sample
        return 0
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    names = [p.name for p in positional]
    if not keyword_only and names[:2] == ["prompt", "response"]:
        num_texts = 3 if names[2:3] == ["data"] else 2
        if len(required) <= num_texts:
            return num_texts
    elif not keyword_only and len(required) <= 1 and (positional or _takes_any(parameters)):
        return 0
    elif not keyword_only and len(required) == 3:
        return 3
    raise ConfigError(
        f"reward.function {name!r} takes ({', '.join(p.name for p in parameters)}); "
        "allowed is (sample) or (prompt, response, data)"
    )


def _takes_any(parameters: Sequence[inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_POSITIONAL for p in parameters)
