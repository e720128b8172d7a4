"""All keys of the configuration as one flat table, made from the structs of `schema`."""

from functools import cache
from typing import Any, get_type_hints

import msgspec
from msgspec import inspect

from headrace.engine.config.fields import Section
from headrace.engine.config.schema import ALIASES, Config


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """One key.

    Attributes:
        path: Dotted, from the top (`algorithm.importance.cap`).
        hint: The annotation with its bounds.
        info: The same as msgspec sees it.
    """

    path: str
    hint: Any
    info: inspect.Type
    default: Any

    @property
    def section(self) -> str:
        """The section's dotted name."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def is_table(self) -> bool:
        """True where the value is a table of free keys."""
        return isinstance(self.info, inspect.DictType)

    @property
    def takes_text(self) -> bool:
        """True where a string is a value of this key."""
        return takes_text(self.info)


def takes_text(info: inspect.Type) -> bool:
    """True where a string can be a value of the type."""
    if isinstance(info, inspect.UnionType):
        return any(takes_text(member) for member in info.types)
    if isinstance(info, inspect.LiteralType):
        return any(isinstance(value, str) for value in info.values)
    return isinstance(info, inspect.StrType)


@cache
def sections() -> dict[str, type[Section]]:
    """Every section by its dotted name, in the order of the schema; the empty name is the whole."""
    found: dict[str, type[Section]] = {}
    _walk("", Config, found, {})
    return found


@cache
def keys() -> dict[str, Key]:
    """Every key by its dotted path, in the order of the schema."""
    found: dict[str, Key] = {}
    _walk("", Config, {}, found)
    return found


@cache
def keys_of(section: str) -> dict[str, Key]:
    """The keys that stand directly in a section, by their last name."""
    return {key.name: key for key in keys().values() if key.section == section}


def subsections_of(section: str) -> tuple[str, ...]:
    """Dotted names of the sections directly below one."""
    return tuple(name for name in sections() if name and name.rpartition(".")[0] == section)


def other_names(path: str) -> tuple[str, ...]:
    """The aliases of a key, as full paths."""
    return tuple(alias for alias, canonical in ALIASES.items() if canonical == path)


def allowed(info: inspect.Type) -> str:
    """What a value of the type may be, as the end of a sentence."""
    match info:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "an integer" + _bounds(info)
        case inspect.FloatType():
            return "a number" + _bounds(info)
        case inspect.StrType():
            return "a string"
        case inspect.LiteralType():
            return "one of " + ", ".join(f'"{value}"' for value in info.values)
        case inspect.VarTupleType():
            return 'a list of strings, such as ["a", "b"]'
        case inspect.DictType():
            return "a table of strings, numbers and booleans"
        case inspect.UnionType():
            members = [allowed(member) for member in info.types if not isinstance(member, inspect.NoneType)]
            return ", ".join(members[:-1]) + " or " + members[-1]
        case _:
            raise AssertionError(f"the schema uses a type that no message describes: {info}")


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    parts: list[str] = []
    if info.ge is not None:
        parts.append(f"of at least {info.ge:g}")
    if info.gt is not None:
        parts.append(f"above {info.gt:g}")
    if info.le is not None:
        parts.append(f"of at most {info.le:g}")
    if info.lt is not None:
        parts.append(f"below {info.lt:g}")
    return " " + " and ".join(parts) if parts else ""


def _walk(name: str, struct: type[Section], into: dict[str, type[Section]], found: dict[str, Key]) -> None:
    into[name] = struct
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        path = f"{name}.{field.name}" if name else field.name
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, Section):
            _walk(path, hint, into, found)
            continue
        default = field.default if field.default is not msgspec.NODEFAULT else _made(field)
        found[path] = Key(path=path, hint=hint, info=inspect.type_info(hint), default=default)


def _made(field: msgspec.structs.FieldInfo) -> Any:
    assert callable(field.default_factory), f"{field.name} has no default; every key needs one"
    return field.default_factory()
