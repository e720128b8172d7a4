"""Sentences for keys that do not exist: where the key may belong and the nearest name that does exist."""

from collections.abc import Iterable
from difflib import get_close_matches

from headrace.engine.config.keys import keys, keys_of, sections, subsections_of
from headrace.engine.config.schema import ALIASES


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that looks most like `name`, or None when nothing does."""
    known = list(choices)
    lowered = {choice.lower(): choice for choice in reversed(known)}
    found = get_close_matches(name.lower().replace("-", "_"), list(lowered), n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def unknown_key(path: str) -> str:
    """One sentence on a dotted path that is no key: its section, what is there, and what was probably meant."""
    section, _, name = path.rpartition(".")
    if section not in sections():
        return _unknown_section(path)
    if not section:
        return _outside_sections(name)
    start = f'{path}: section [{section}] has no key "{name}"'
    if homes := _homes(name):
        return f"{start}; {_elsewhere(homes)}"
    inner = [below.rpartition(".")[2] for below in subsections_of(section)]
    names = [*keys_of(section), *inner, *_aliases_of(section)]
    if close := nearest(name, names):
        return f"{start}; did you mean {section}.{close}?"
    if close := nearest(name, _all_names()):
        return f"{start}; did you mean {_homes(close)[0]}?"
    return f"{start}; its keys are {', '.join([*keys_of(section), *inner])}"


def _unknown_section(path: str) -> str:
    section, _, name = path.rpartition(".")
    if section in keys():
        return f"{path}: {section} is a single key, with no keys below it"
    start = f"{path}: there is no section [{section}]"
    tails = {known.rpartition(".")[2]: known for known in sections() if known}
    close = nearest(section, [known for known in sections() if known]) or tails.get(section.rpartition(".")[2])
    if close is not None and (name in keys_of(close) or f"{close}.{name}" in ALIASES):
        return f"{start}; did you mean {close}.{name}?"
    if homes := _homes(name):
        return f"{start}; {_elsewhere(homes)}"
    if close is not None:
        return f"{start}; did you mean [{close}]?"
    return f"{start}; the sections are {', '.join(known for known in sections() if known)}"


def _outside_sections(name: str) -> str:
    if name in sections():
        return f"{name}: this is a section; name one of its keys, such as {name}.{next(iter(keys_of(name)))}"
    if homes := _homes(name):
        places = " or ".join(homes)
        return f"{name}: this key stands outside any section; write {places}"
    close = nearest(name, [*_all_names(), *subsections_of("")])
    if close in subsections_of(""):
        return f"{name}: there is no such section; did you mean [{close}]?"
    if close is not None:
        return f"{name}: there is no such key or section; did you mean {_homes(close)[0]}?"
    return f"{name}: there is no such section; the sections are {', '.join(subsections_of(''))}"


def _elsewhere(homes: list[str]) -> str:
    places = ", ".join(f"[{home.rpartition('.')[0]}]" for home in homes)
    return f"that key exists in {places}: write {' or '.join(homes)}"


def _homes(name: str) -> list[str]:
    """Full paths of keys, sections and aliases whose last part is `name`; the names to write, not the aliases."""
    found = [path for path in [*keys(), *sections()] if path and path.rpartition(".")[2] == name]
    found += [canonical for alias, canonical in ALIASES.items() if alias.rpartition(".")[2] == name]
    return found


def _aliases_of(section: str) -> list[str]:
    return [alias.rpartition(".")[2] for alias in ALIASES if alias.rpartition(".")[0] == section]


def _all_names() -> list[str]:
    names = [path.rpartition(".")[2] for path in [*keys(), *ALIASES]]
    return list(dict.fromkeys(names))
