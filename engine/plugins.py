"""Finding implementations by name, so that layers compose what they do not import.

Only what the operator names in a configuration, on the command line or as an installed entry point is imported; a name
that arrived over the wire must never reach these functions.
"""

import pkgutil
import sys
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

from headrace.engine.errors import UsageError


def load_object(spec: str) -> object:
    """Import what `module:function` (or `module:Class.method`) names. Blocks for the import.

    Raises:
        UsageError: The form is wrong, the module or the attribute does not exist, or importing the module failed.
    """
    module_name, colon, attributes = spec.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module_name.split("."), *attributes.split(".")]):
        raise UsageError(f'"{spec}" does not name an object; write it as "module:function"')
    found: object = _import(module_name, spec)
    for part in attributes.split("."):
        if not hasattr(found, part):
            hint = _hint(part, [name for name in dir(found) if not name.startswith("_")])
            raise UsageError(f'"{spec}": module {module_name} has no {part}{hint}')
        found = getattr(found, part)
    return found


def load_entry_point(group: str, name: str) -> object:
    """Import the implementation that a distribution registered as `name` in `group`.

    A name of the form `module:function` is imported as it stands, so that own code needs no entry point.

    Args:
        group: Such as `headrace.algorithms`.
        name: Such as `grpo`.

    Raises:
        UsageError: Nothing of that name is registered, or importing it failed.
    """
    if ":" in name:
        return load_object(name)
    from importlib.metadata import EntryPoint, entry_points  # slow to import, and most commands need no entry point

    known: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        known.setdefault(point.name, point)
    if name not in known:
        listed = ", ".join(sorted(known)) or "none is installed"
        raise UsageError(f'"{name}" is not registered in {group}{_hint(name, list(known))}; there are: {listed}')
    return load_object(known[name].value)


def _import(module_name: str, spec: str) -> ModuleType:
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == module_name or module_name.startswith(f"{missing}."):
            hint = _hint(missing.rpartition(".")[2], _siblings(missing))
            raise UsageError(f'"{spec}": there is no module {missing}{hint}') from error
        raise UsageError(f'"{spec}" {missing_module(error)}') from error
    except Exception as error:  # whatever the user's module does while it is imported
        raise UsageError(f'"{spec}": importing {module_name} failed with {type(error).__name__}: {error}') from error


def _siblings(module_name: str) -> list[str]:
    """Names of the modules beside a missing one."""
    parent = sys.modules.get(module_name.rpartition(".")[0])
    if parent is None or not hasattr(parent, "__path__"):
        return []
    return [module.name for module in pkgutil.iter_modules(parent.__path__)]


def missing_module(error: ModuleNotFoundError) -> str:
    """The end of a sentence: which module is needed, and what installs it where that is one of our extras."""
    missing = error.name or "?"
    extras = {"torch": "train", "transformers": "train", "rich": "train", "vllm": "vllm", "reasoning_gym": "examples"}
    extra = extras.get(missing.partition(".")[0])
    remedy = f"; pip install 'headrace[{extra}]' adds it" if extra else ""
    return f"needs the module {missing}, which is not installed{remedy}"


def _hint(name: str, choices: list[str]) -> str:
    close = get_close_matches(name, choices, n=1)
    return f"; did you mean {close[0]}?" if close else ""
