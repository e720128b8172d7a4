"""The configuration as text: the effective one as TOML, and the schema with its comments."""

import ast
import inspect
import io
import json
import math
import re
import textwrap
import tokenize
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from typing import Any, cast

from headrace.engine.config.fields import Section
from headrace.engine.config.keys import Key, allowed, keys, other_names, sections
from headrace.engine.config.schema import Config
from headrace.engine.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def effective_toml(config: Config) -> str:
    """Every key with the value that is in force; `load_config(None, text=...)` of it gives an equal configuration.

    Raises:
        ConfigError: A value has no TOML form (None among the free keys of a table).
    """
    values: dict[str, Any] = {}
    for path in keys():
        value: Any = config
        for part in path.split("."):
            value = getattr(value, part)
        values[path] = value
    lines: list[str] = []
    for section in sections():
        mine = [key for key in keys().values() if key.section == section]
        if mine:
            lines += ["", f"[{section}]", *(f"{key.name} = {_written(key, values[key.path])}" for key in mine)]
    return "\n".join(lines[1:]) + "\n"


def describe_schema() -> str:
    """Every key with its default, what it may be and what it is for. The text is itself a valid configuration file."""
    lines: list[str] = []
    for section, struct in sections().items():
        mine = [key for key in keys().values() if key.section == section]
        if not mine:
            continue
        comments = _field_comments(struct)
        summary = (struct.__doc__ or "").strip().splitlines()[0]
        lines += ["", f"[{section}]  # {summary}"]
        left = [f"{key.name} = {toml_value(key.default)}" for key in mine]
        width = min(40, max(len(text) for text in left))
        for key, text in zip(mine, left, strict=True):
            lines.append(f"{text:<{width}}  # {_about(key, comments.get(key.name, ''))}")
    return "\n".join(lines[1:]) + "\n"


def toml_value(value: Any) -> str:
    """One value as TOML.

    Raises:
        ConfigError: The value has no TOML form.
    """
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else str(value)
        case str():
            # A JSON string is a TOML basic string, but for the one control character that JSON leaves alone.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return "[" + ", ".join(toml_value(entry) for entry in cast(Sequence[Any], value)) + "]"
        case dict():
            entries = cast(Mapping[str, Any], value).items()
            inner = ", ".join(f"{_toml_key(name)} = {toml_value(entry)}" for name, entry in entries)
            return f"{{ {inner} }}" if inner else "{}"
        case datetime() | date() | time():
            return value.isoformat()
        case _:
            raise ConfigError(f"{value!r} has no TOML form; use strings, numbers, booleans, lists and tables")


def _written(key: Key, value: Any) -> str:
    if isinstance(value, dict):
        for name, entry in cast(dict[str, Any], value).items():
            if entry is None:
                raise ConfigError(f"{key.path}.{name} is None, which TOML cannot express; leave the key out")
    return toml_value(value)


def _toml_key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else toml_value(name)


def _about(key: Key, comment: str) -> str:
    parts = [allowed(key.info)]
    if comment:
        parts.append(comment)
    if aliases := other_names(key.path):
        parts.append("also: " + ", ".join(alias.rpartition(".")[2] for alias in aliases))
    return "; ".join(parts)


def _field_comments(struct: type[Section]) -> dict[str, str]:
    """The comment at the end of each field's line, read from the source; empty where the source is not there."""
    try:
        source = textwrap.dedent(inspect.getsource(struct))
    except (OSError, TypeError):  # an installation without sources still shows names, types and defaults
        return {}
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = cast(ast.ClassDef, ast.parse(source).body[0]).body
    return {
        node.target.id: comments[node.end_lineno]
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno in comments
    }
