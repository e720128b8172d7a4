"""What the buffer service serves: any `BufferBackend`. `TableBackend` has tables alone, a hub has a ledger as well."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace.buffers.groups import PutVerdict, StoredRecord
from headrace.buffers.stats import TableStats
from headrace.engine.errors import FormatError
from headrace.engine.records import peek_header
from headrace.engine.types import BatchPlan, PolicyVersion
from headrace.engine.types.records import RecordHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOrder:
    """One rank asks for the batch of a step.

    Attributes:
        deadline_s: Seconds to wait; None waits as long as the caller does.
        sharing_hidden_size: Hidden size of a model that computes the prompt of a group once; 0: it cannot.
    """

    table: str
    step: int
    consumer_id: str
    incarnation: int
    rank: int
    num_ranks: int
    deadline_s: float | None
    sharing_hidden_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedBatch:
    """The leased batch of a step, for all ranks.

    Attributes:
        records: By record id; every record that the plan names.
        mean_lag, max_lag: Over the records, step minus version of the oldest token.
    """

    lease_token: int
    plan: BatchPlan
    records: Mapping[str, StoredRecord]
    mean_lag: float
    max_lag: int


class BufferBackend(Protocol):
    """Tables as the service sees them. All errors are HeadraceErrors; they reach the caller as themselves."""

    def stats(self, table: str) -> TableStats:
        """A table's statistics.

        Raises:
            SchemaError: There is no such table.
        """
        ...

    def offer_record(self, table: str, header: RecordHeader, data: bytes) -> PutVerdict:
        """Store a record now, or say why not. Never waits.

        Raises:
            FormatError: The bytes are not a record, or not that of the header.
        """
        ...

    async def put_record(self, table: str, header: RecordHeader, data: bytes, producer_id: str) -> PutVerdict:
        """Store a record that was answered FULL, as soon as there is room. Cancelling withdraws it."""
        ...

    def put_column(self, table: str, record_id: str, name: str, data: bytes) -> PutVerdict:
        """Add a column to a stored record. Never waits."""
        ...

    async def take(self, order: TakeOrder) -> LeasedBatch:
        """Lease the batch of a step, waiting for it; all ranks of an incarnation get the same one.

        Raises:
            DeadlineError: It was not there in time; names what is missing.
            FencedError: The incarnation is not the current one, or the step is committed.
        """
        ...

    async def commit(self, table: str, step: int, token: int, skipped: bool) -> PolicyVersion:
        """Consume a leased batch; returns the version after the step. Again with the same token: the same answer.

        Raises:
            FencedError: The token is not that of the step's lease.
        """
        ...

    async def release(self, table: str, step: int, token: int) -> None:
        """Give a leased batch back.

        Raises:
            FencedError: The token is not that of the step's lease.
        """
        ...


def check_record(header: RecordHeader, data: bytes) -> None:
    """Compare a header that came beside a record with the one inside it.

    Raises:
        FormatError: The bytes are damaged, or the headers differ.
    """
    inside = peek_header(data)
    if inside != header:
        raise FormatError(
            f"record {header.record_id!r} came with a header that is not its own ({inside.record_id!r} inside)"
        )
