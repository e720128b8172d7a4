"""What a full table does: push back (the default), or evict by a named policy."""

from collections.abc import Iterable
from typing import Protocol

from headrace.buffers.groups import Group
from headrace.engine.errors import ConfigError


class Remover(Protocol):
    """Names the group that makes room. Pure; only whole groups that nobody has leased are offered."""

    @property
    def name(self) -> str:
        """How configuration and counters call the policy."""
        ...

    def victim(self, groups: Iterable[Group]) -> str | None:
        """The group to evict out of those offered, oldest insertion first; None refuses, and the put waits."""
        ...


class NoRemover:
    """Evicts nothing: a full table pushes back."""

    name = "none"

    def victim(self, groups: Iterable[Group]) -> str | None:
        return None


class OldestRemover:
    """Evicts the group whose first record came first."""

    name = "oldest"

    def victim(self, groups: Iterable[Group]) -> str | None:
        return next((group.group_id for group in groups), None)


REMOVERS: dict[str, type[Remover]] = {"none": NoRemover, "oldest": OldestRemover}


def remover_named(name: str) -> Remover:
    """A shipped remover.

    Raises:
        ConfigError: There is none of this name.
    """
    kind = REMOVERS.get(name)
    if kind is None:
        raise ConfigError(f"there is no eviction policy {name!r}; choose one of {', '.join(REMOVERS)}")
    return kind()
