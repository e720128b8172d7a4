"""`--section.key=value` of the command line."""

import re
import tomllib
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.engine.config.keys import Key, allowed, keys, takes_text
from headrace.engine.config.schema import ALIASES
from headrace.engine.config.suggest import unknown_key
from headrace.engine.errors import ConfigError

_FORM = re.compile(r"--[A-Za-z_][\w-]*(\.[\w-]+)+(=.*)?", re.DOTALL)


def is_override(argument: str) -> bool:
    """True for an argument of the form `--section.key` or `--section.key=value`."""
    return _FORM.fullmatch(argument) is not None


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Values by path, in the order given; the same key given twice has its last value.

    Values are TOML (`1e-5` is a number, `true` a boolean, `["a", "b"]` a list). Where the key takes a string, what is
    not a TOML string is taken as it stands, so that `--run.name=first` and `--run.name=7` need no quotes. Paths below a
    table of free keys (`data.options.min_terms`) are kept whole; there only what is not TOML is taken as a string.

    Args:
        overrides: Each `--section.key=value`; the leading dashes may be missing.

    Raises:
        ConfigError: The form, the key or the value is wrong, or a key is given under two names.
    """
    values: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    for argument in overrides:
        name, equals, text = argument.removeprefix("--").partition("=")
        if not equals:
            raise ConfigError(f"--{name} has no value; write it as --{name}=VALUE")
        path = ALIASES.get(name, name)
        if given_as.setdefault(path, name) != name:
            raise ConfigError(f"--{given_as[path]} and --{name} are two names of one key; keep one of them")
        values[path] = _value(path, text, argument)
    return values


def _value(path: str, text: str, argument: str) -> Any:
    key = _key(path)
    wants_text = key.takes_text or (key.path != path and takes_text(_member(key)))
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if wants_text:
            return text
        raise ConfigError(f"{argument} is not allowed: give {allowed(key.info)}") from error
    value = parsed["value"]
    # A line break in the text would smuggle in further keys.
    if set(parsed) != {"value"}:
        if wants_text:
            return text
        raise ConfigError(f"{argument!r} is not allowed: give one value, without line breaks")
    # The free keys of a table take several types, so there TOML decides; a key that takes only strings gets a string.
    return text if key.takes_text and not isinstance(value, str) else value


def _key(path: str) -> Key:
    """The key itself, or the table of free keys that the path leads into."""
    known = keys()
    if path in known:
        return known[path]
    parent = path.rpartition(".")[0]
    if parent in known and known[parent].is_table:
        return known[parent]
    raise ConfigError(f"--{unknown_key(path)}")


def _member(key: Key) -> msgspec.inspect.Type:
    assert isinstance(key.info, msgspec.inspect.DictType)
    return key.info.value_type
