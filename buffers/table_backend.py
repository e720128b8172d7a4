"""The backend of a buffer that stands alone: one rule for what makes up a step, and no ledger."""

from collections.abc import Callable, Mapping

import numpy as np

from headrace.buffers.async_table import AsyncTable
from headrace.buffers.backend import LeasedBatch, TakeOrder, check_record
from headrace.buffers.groups import GroupView, PutVerdict, ReadyGroup
from headrace.buffers.samplers import FifoSampler
from headrace.buffers.stats import TableStats
from headrace.engine.errors import ConfigError, SchemaError, UsageError
from headrace.engine.interfaces import Sampler
from headrace.engine.scheduling.batch_plan import PlanItem, plan_batch
from headrace.engine.scheduling.leases import Lease
from headrace.engine.types import PolicyVersion
from headrace.engine.types.records import RecordHeader


class TableBackend:
    """Tables by name; a step gets `groups_per_step` groups, chosen by a sampler.

    Args:
        tables: The tables; changed through this object and `AsyncTable` alone.
        groups_per_step: Groups of one step; a take waits until so many are ready.
        token_budget: Tokens of one packed micro-batch.
        sampler: Which groups; the longest in the table by default.
        incarnation: Of the versions that commits answer with.
        seed: Of the sampler's generator; each step has its own.
        check: Called with each record before it is stored; None trusts the producers.

    Raises:
        ConfigError: `groups_per_step` or `token_budget` is below 1.
    """

    def __init__(
        self,
        tables: Mapping[str, AsyncTable],
        *,
        groups_per_step: int,
        token_budget: int,
        sampler: Sampler | None = None,
        incarnation: int = 0,
        seed: int = 0,
        check: Callable[[RecordHeader, bytes], None] | None = check_record,
    ) -> None:
        if groups_per_step < 1 or token_budget < 1:
            raise ConfigError(
                f"groups_per_step and token_budget must be at least 1, got {groups_per_step} and {token_budget}"
            )
        self._tables = dict(tables)
        self._groups_per_step = groups_per_step
        self._token_budget = token_budget
        self._sampler: Sampler = sampler or FifoSampler()
        self._incarnation = incarnation
        self._seed = seed
        self._check = check
        # The batch of each live lease, so that every rank sees the same plan.
        self._batches: dict[tuple[str, int], LeasedBatch] = {}

    def table(self, name: str) -> AsyncTable:
        """A table by name.

        Raises:
            SchemaError: There is none of this name.
        """
        table = self._tables.get(name)
        if table is None:
            raise SchemaError(f"there is no table {name!r}; the tables are {', '.join(self._tables)}")
        return table

    def stats(self, table: str) -> TableStats:
        """See `BufferBackend.stats`."""
        return self.table(table).stats()

    def offer_record(self, table: str, header: RecordHeader, data: bytes) -> PutVerdict:
        """See `BufferBackend.offer_record`."""
        if self._check is not None:
            self._check(header, data)
        return self.table(table).offer(header, data)

    async def put_record(self, table: str, header: RecordHeader, data: bytes, producer_id: str) -> PutVerdict:
        """See `BufferBackend.put_record`."""
        return await self.table(table).put(header, data, who=producer_id)

    def put_column(self, table: str, record_id: str, name: str, data: bytes) -> PutVerdict:
        """See `BufferBackend.put_column`."""
        return self.table(table).add_column(record_id, name, data)

    async def take(self, order: TakeOrder) -> LeasedBatch:
        """See `BufferBackend.take`.

        Raises:
            UsageError: The rank is not below `num_ranks`, or the ranks of a step disagree on their number.
        """
        if not 0 <= order.rank < order.num_ranks:
            raise UsageError(f"rank {order.rank} of {order.num_ranks} asks for step {order.step}; ranks count from 0")
        table = self.table(order.table)
        lease = await table.take(
            order.step,
            lambda ready: self._choose(order.step, ready),
            consumer_id=order.consumer_id,
            incarnation=order.incarnation,
            deadline_s=order.deadline_s,
        )
        self._forget_ended(order.table, table)
        key = (order.table, lease.token)
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = self._plan(table, lease, order.num_ranks)
        if len(batch.plan.ranks) != order.num_ranks:
            raise UsageError(
                f"step {order.step} is planned for {len(batch.plan.ranks)} ranks, and rank {order.rank} says that "
                f"there are {order.num_ranks}; release the step first, or start all ranks with the same number"
            )
        return batch

    async def commit(self, table: str, step: int, token: int, skipped: bool) -> PolicyVersion:
        """See `BufferBackend.commit`."""
        self.table(table).commit(step, token)
        self._forget_ended(table, self.table(table))
        return PolicyVersion(self._incarnation, step + 1)

    async def release(self, table: str, step: int, token: int) -> None:
        """See `BufferBackend.release`."""
        self.table(table).release(step, token)
        self._forget_ended(table, self.table(table))

    def _choose(self, step: int, ready: list[ReadyGroup]) -> list[str] | None:
        if len(ready) < self._groups_per_step:
            return None
        view = GroupView.of(ready)
        rng = np.random.default_rng([self._seed, step])
        version = PolicyVersion(self._incarnation, step)
        chosen = self._sampler.select(view, self._groups_per_step, version, rng)
        return [view.group_ids[position] for position in chosen]

    def _plan(self, table: AsyncTable, lease: Lease, num_ranks: int) -> LeasedBatch:
        stored = [record for group_id in lease.items for record in table.table.records_of(group_id)]
        headers = [record.header for record in stored]
        items = [
            PlanItem(
                record_id=header.record_id,
                group_id=header.group_id,
                num_tokens=header.num_prompt_tokens + header.num_response_tokens,
                num_loss_tokens=header.num_loss_tokens,
            )
            for header in headers
        ]
        lags = [max(0, lease.step - header.oldest_version.version) for header in headers]
        return LeasedBatch(
            lease_token=lease.token,
            plan=plan_batch(lease.step, items, num_ranks, self._token_budget),
            records={record.header.record_id: record for record in stored},
            mean_lag=sum(lags) / len(lags),
            max_lag=max(lags),
        )

    def _forget_ended(self, name: str, table: AsyncTable) -> None:
        live = {(name, lease.token) for lease in table.leases.live}
        for key in [key for key in self._batches if key[0] == name and key not in live]:
            del self._batches[key]
