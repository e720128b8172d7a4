"""The hub's side of the buffer service: the table with the ledger and the staleness window around it.

    consumes    records from rollout workers, takes and commits from learner ranks
    produces    leased batches with their plans; trained groups
    waits for   room in the table; for a take: enough ready groups, none that would expire, no evaluation in the way

Invariants:
- A record is stored only for the current attempt of an unfinished group.
- All ranks of a step get the same lease and the same plan.
- A commit moves ledger, window, table and version together, once.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.engine.errors import FencedError, FormatError, HeadraceError, SchemaError, UsageError
from headrace.engine.hub.credit import Batch, build_batch
from headrace.engine.hub.evaluation import TABLE as EVAL_TABLE
from headrace.engine.hub.evaluation import EvalFlow
from headrace.engine.hub.flow import Ended
from headrace.engine.hub.ports import TablePort, TableStats, Verdict, ids_of
from headrace.engine.hub.scoring import Stored
from headrace.engine.hub.state import HubState
from headrace.engine.interfaces import Algorithm
from headrace.engine.records import decode_trajectory, header_of
from headrace.engine.scheduling.leases import Lease
from headrace.engine.types import DropReason, PolicyVersion
from headrace.engine.types.records import RecordHeader

TRAIN_TABLE = "train"


class Order(Protocol):
    """One rank asks for the batch of a step."""

    @property
    def table(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def consumer_id(self) -> str: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def deadline_s(self) -> float | None: ...

    @property
    def sharing_hidden_size(self) -> int: ...


class HubBuffer:
    """Serves the train and eval tables of a run."""

    def __init__(
        self, state: HubState, evals: EvalFlow, algorithm: Algorithm, *, on_ended: Callable[[list[Ended]], None]
    ) -> None:
        self._state = state
        self._evals = evals
        self._algorithm = algorithm
        self._on_ended = on_ended
        self._batches: dict[int, Batch] = {}

    # Producers

    def stats(self, table: str) -> TableStats:
        """A table's statistics.

        Raises:
            SchemaError: There is no such table.
        """
        return self._table(table).stats()

    def offer_record(self, table: str, header: RecordHeader, data: bytes) -> Verdict:
        """Store a record now, or say why not. Never waits.

        Raises:
            FencedError: The group is over or at a later attempt.
            FormatError: The bytes are not the record that the header announces.
        """
        self._refuse_late(table, header)
        # Here, where one record is refused, and not where it is read, where the run would end.
        if header_of(decode_trajectory(data)) != header:
            raise FormatError(f"record {header.record_id!r} came with a header that is not its own")
        return self._table(table).offer(header, data)

    async def put_record(self, table: str, header: RecordHeader, data: bytes, producer_id: str) -> Verdict:
        """Store a record that was offered as soon as there is room. Cancelling withdraws it.

        Raises:
            FencedError: The group is over or at a later attempt.
            DeadlineError: There was no room within `timeouts.no_progress_s`.
        """
        self._refuse_late(table, header)
        limit_s = self._state.config.timeouts.no_progress_s
        return await self._table(table).put(header, data, who=producer_id, deadline_s=limit_s)

    def put_column(self, table: str, record_id: str, name: str, data: bytes) -> Verdict:
        """Add a column to a stored record. Never waits."""
        return self._table(table).add_column(record_id, name, data)

    def _refuse_late(self, table: str, header: RecordHeader) -> None:
        flow = self._evals if table == EVAL_TABLE else self._state.flow
        if not flow.is_current(header.group_id, header.attempt):
            raise FencedError(f"group {header.group_id!r} is over, or at a later attempt than {header.attempt}")

    def _table(self, name: str) -> TablePort:
        tables = {TRAIN_TABLE: self._state.train, EVAL_TABLE: self._state.evals}
        if name not in tables:
            raise SchemaError(f"there is no table {name!r}; the tables are {', '.join(tables)}")
        return tables[name]

    # The learner

    async def take(self, order: Order) -> Batch:
        """Lease the batch of a step, waiting for it; all ranks of an incarnation get the same one.

        Raises:
            DeadlineError: It was not there in time; names what is missing.
            FencedError: The incarnation is not the current one, or the step is committed.
            StoppedError: The run is ending.
        """
        state = self._state
        if order.table != TRAIN_TABLE:
            raise SchemaError(f"table {order.table!r} is not trained on; take from {TRAIN_TABLE!r}")
        if order.num_ranks != state.config.learner.num_ranks or order.rank >= order.num_ranks:
            raise FencedError(
                f"rank {order.rank} says that there are {order.num_ranks} ranks; learner.num_ranks is "
                f"{state.config.learner.num_ranks}"
            )
        state.refuse_if_ended()
        state.members.rank_asked("learner", order.rank, state.clock.monotonic())
        lease = await state.train.take(
            order.step,
            lambda ready: self._choose(ids_of(ready), order.step),
            consumer_id=order.consumer_id,
            incarnation=order.incarnation,
            deadline_s=order.deadline_s,
        )
        batch = self._batches.get(lease.token)
        if batch is None:
            state.flow.leased(lease.items, order.step)
            batch = self._batches[lease.token] = self._plan(lease, order.sharing_hidden_size)
            state.changed()
        return batch

    def _choose(self, ready: list[str], step: int) -> list[str] | None:
        state = self._state
        state.refuse_if_ended()
        self._drop_expired(step)
        if state.hold_step == step:
            return None
        batch = state.flow.choose([group_id for group_id in ready if state.flow.group(group_id)], step)
        if batch is not None:
            self._drop_expired(step, batch)
        return batch

    def _drop_expired(self, step: int, batch: Sequence[str] = ()) -> None:
        """End the groups that no step to come may train on."""
        state = self._state
        for group_id, attempt in state.flow.expired(step, batch):
            state.reporting.parts.add("off_policy/dropped", 1)
            for record in self._records_of(group_id):
                state.reporting.parts.add("off_policy/dropped_tokens", record.header.num_response_tokens)
            self._on_ended(state.flow.drop(group_id, attempt, DropReason.STALE))

    def _records_of(self, group_id: str) -> Sequence[Stored]:
        try:
            records: Sequence[Stored] = self._state.train.table.records_of(group_id)
            return records
        except UsageError:  # nothing of it has arrived yet
            return ()

    def _plan(self, lease: Lease, sharing_hidden_size: int) -> Batch:
        state, config = self._state, self._state.config
        batch = build_batch(
            [state.train.table.records_of(group_id) for group_id in lease.items],
            step=lease.step,
            lease_token=lease.token,
            config=config,
            algorithm=self._algorithm,
            sharing_hidden_size=sharing_hidden_size,
        )
        state.tokens_by_step[lease.step + 1] = sum(len(s.trajectory.response_token_ids) for s in batch.samples)
        return batch

    async def commit(self, table: str, step: int, token: int, skipped: bool) -> PolicyVersion:
        """Consume a leased batch; returns the version after the step. Again with the same token: the same answer.

        Raises:
            FencedError: The token is not that of the step's lease.
            StorageError: The samples of the step could not be written down; the commit counts all the same.
        """
        state = self._state
        commit = state.train.commit(step, token)
        version = PolicyVersion(state.version.incarnation, step + 1)
        if not commit.first:
            return version
        ended = state.flow.trained(step)
        state.version = version
        batch = self._batches.pop(token)
        state.progressed()
        state.reporting.parts.add("actor/skipped", float(skipped))
        state.reporting.parts.add("groups/zero_variance", batch.num_without_credit)
        state.num_updates += not skipped and any(sample.advantage for sample in batch.samples)
        try:
            state.reporting.trained_on(step, batch.samples)
        except HeadraceError as error:
            state.end("failed", error)
        self._on_ended(ended)
        state.changed()
        return version

    async def release(self, table: str, step: int, token: int) -> None:
        """Give a leased batch back.

        Raises:
            FencedError: The token is not that of the step's lease.
        """
        self._state.train.release(step, token)
        self._return([token])

    def consumer_lost(self, consumer_id: str, incarnation: int) -> None:
        """The learner is proven dead: what it had leased can be taken again."""
        self._state.train.consumer_lost(consumer_id, incarnation)
        self._return(list(self._batches))

    def _return(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            batch = self._batches.pop(token, None)
            if batch is not None:
                self._state.flow.released(list(dict.fromkeys(sample.trajectory.group_id for sample in batch.samples)))
        self._state.changed()
