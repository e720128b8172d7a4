"""What the hub needs of the roles that it composes but does not import."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from headrace.engine.scheduling.leases import Commit, Lease
from headrace.engine.types.records import RecordHeader


class Verdict(Protocol):
    """Answer to a put."""

    @property
    def accepted(self) -> bool: ...

    @property
    def reason(self) -> str: ...


class ReadyGroup(Protocol):
    """A whole group that could be taken."""

    @property
    def group_id(self) -> str: ...


class TableStats(Protocol):
    """Figures of a table."""

    @property
    def num_records(self) -> int: ...

    @property
    def num_groups(self) -> int: ...

    @property
    def num_ready(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def num_added(self) -> int: ...

    @property
    def num_evicted(self) -> int: ...

    @property
    def num_sampled(self) -> int: ...


class TablePort(Protocol):
    """A table with waiting, as `headrace.buffers.async_table.AsyncTable` offers it."""

    @property
    def table(self) -> Any: ...

    def offer(self, header: RecordHeader, data: bytes) -> Verdict: ...

    async def put(self, header: RecordHeader, data: bytes, *, who: str, deadline_s: float | None) -> Verdict: ...

    def add_column(self, record_id: str, name: str, data: bytes) -> Verdict: ...

    def drop_group(self, group_id: str, reason: str) -> bool: ...

    def requeue(self, group_id: str, attempt: int) -> None: ...

    def take(
        self,
        step: int,
        choose: Callable[[list[Any]], list[str] | None],
        *,
        consumer_id: str,
        incarnation: int,
        deadline_s: float | None,
    ) -> Awaitable[Lease]: ...

    def commit(self, step: int, token: int) -> Commit: ...

    def release(self, step: int, token: int) -> None: ...

    def consumer_lost(self, consumer_id: str, incarnation: int) -> None: ...

    def changed(self) -> None: ...

    def stats(self) -> TableStats: ...


def ids_of(groups: Iterable[ReadyGroup]) -> list[str]:
    """The ids, in order."""
    return [group.group_id for group in groups]
