"""From a TOML file and the command line to a checked `Config`.

Steps: parse, put every key under its canonical path (unknown ones are refused here) and check its value, lay the
command line over the file, build the structs, check what must hold between keys.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import inspect

from headrace.engine.config.checks import check_relations
from headrace.engine.config.keys import Key, allowed, keys, sections
from headrace.engine.config.overrides import parse_overrides
from headrace.engine.config.render import toml_value
from headrace.engine.config.schema import ALIASES, Config
from headrace.engine.config.suggest import unknown_key
from headrace.engine.errors import ConfigError


def load_config(path: str | Path | None, overrides: Sequence[str] = (), text: str | None = None) -> Config:
    """Read and check a whole configuration. Reads one file; blocks as long as that takes.

    Args:
        path: A TOML file; None takes the defaults.
        overrides: `--section.key=value`, laid over the file; of a key given twice the last one counts.
        text: TOML to take instead of the file's content; `path` then only names it in messages.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, a value is not allowed, or two settings contradict each
            other.
    """
    config = read_config(path, overrides, text)
    check_relations(config)
    return config


def read_config(path: str | Path | None, overrides: Sequence[str] = (), text: str | None = None) -> Config:
    """Like `load_config`, without the checks between keys: for showing a configuration that is not complete yet."""
    values: dict[str, Any] = {}
    if text is not None or path is not None:
        name = str(path) if path is not None else "<text>"
        try:
            content = text if text is not None else _read(Path(cast("str | Path", path)))
            _flatten(tomllib.loads(content), "", values, {})
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{name} is not TOML: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error.__cause__
    _lay_over(values, parse_overrides(overrides))
    return _build(values)


def check_config(config: Config) -> None:
    """Check a configuration that was built in code: each value, and what must hold between keys.

    `load_config` has done this for what it returns. The structs themselves check nothing when they are made in code.

    Raises:
        ConfigError: A value is not allowed, or two settings contradict each other.
    """
    values: dict[str, Any] = {}
    for path in keys():
        owner: Any = config
        for part in path.split("."):
            owner = getattr(owner, part)
        values[path] = msgspec.to_builtins(owner)
    for path, value in values.items():
        _check_value(keys()[path], value)
    check_relations(config)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError("there is no such configuration file") from error
    except OSError as error:
        raise ConfigError(f"the configuration file cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("the configuration file is not UTF-8 text") from error


def _flatten(tree: Mapping[str, Any], section: str, values: dict[str, Any], given_as: dict[str, str]) -> None:
    """Put every leaf of the parsed file into `values` under its canonical path."""
    for name, value in tree.items():
        path = f"{section}.{name}" if section else name
        if path in sections():
            if not isinstance(value, dict):
                raise ConfigError(f"{path} = {toml_value(value)} is not allowed: {path} is a section, write [{path}]")
            _flatten(cast(dict[str, Any], value), path, values, given_as)
            continue
        canonical = ALIASES.get(path, path)
        if canonical not in keys():
            raise ConfigError(unknown_key(_first_unknown(path, value)))
        if given_as.setdefault(canonical, path) != path:
            raise ConfigError(f"{given_as[canonical]} and {path} are two names of one key; keep one of them")
        _check_value(keys()[canonical], value, given=path)
        values[canonical] = value


def _first_unknown(path: str, value: Any) -> str:
    """The path to report: a key of the unknown section where it has any, for that tells more about what was meant."""
    while isinstance(value, dict) and value:
        name, value = next(iter(cast(dict[str, Any], value).items()))
        path = f"{path}.{name}"
    return path


def _lay_over(values: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    for path, value in overrides.items():
        if path in keys():
            _check_value(keys()[path], value)
            values[path] = value
            continue
        table, _, name = path.rpartition(".")
        entries = {**values.get(table, {}), name: value}
        _check_value(keys()[table], entries)
        values[table] = entries


def _check_value(key: Key, value: Any, given: str | None = None) -> None:
    """One value against its annotation; `given` is the name under which the user wrote it."""
    path = given or key.path
    if key.is_table and isinstance(value, dict):
        for name, entry in cast(dict[str, Any], value).items():
            _check_entry(key, f"{path}.{name}", entry)
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path} = {toml_value(value)} is not allowed: give {allowed(key.info)} that is finite")
    try:
        msgspec.convert(value, type=key.hint)
    except msgspec.ValidationError as error:
        quoted = isinstance(value, str) and isinstance(key.info, inspect.IntType | inspect.FloatType | inspect.BoolType)
        hint = ", without quotes" if quoted else ""
        raise ConfigError(f"{path} = {toml_value(value)} is not allowed: give {allowed(key.info)}{hint}") from error


def _check_entry(key: Key, path: str, value: Any) -> None:
    assert isinstance(key.info, inspect.DictType)
    if value is not None and not isinstance(value, str | int | float):
        raise ConfigError(f"{path} = {toml_value(value)} is not allowed: give {allowed(key.info.value_type)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path} = {toml_value(value)} is not allowed: give a finite number")


def _build(values: Mapping[str, Any]) -> Config:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[name] = value
    return msgspec.convert(tree, type=Config)
