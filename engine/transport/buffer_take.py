"""A learner rank's end of the buffer service: take, commit, release. Blocking code."""

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import grpc

from headrace.engine.errors import ActorLostError, FormatError
from headrace.engine.scheduling.retry import Deadline, RetryPolicy
from headrace.engine.transport.buffer_wire import (
    CALL_TIMEOUT_S,
    Assembler,
    BufferStats,
    micro_batch_from_proto,
    stats_from_proto,
    whole_records,
)
from headrace.engine.transport.convert import version_from_proto
from headrace.engine.transport.status import error_from_rpc
from headrace.engine.types import MicroBatchPlan, PolicyVersion
from headrace.v1 import buffer_pb2 as pb
from headrace.v1 import buffer_pb2_grpc as rpc

_RETRY = RetryPolicy(retries=1_000_000, base_s=0.1, max_s=2.0, jitter=1.0)

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBatch:
    """One rank's share of the leased batch of a step, with counts over all ranks.

    Attributes:
        lease_token: Goes with commit, release, publish and checkpoint.
        micro_batches: What the rank runs, in order; equally many on every rank.
        records: Encoded records by id, in the plan's order.
        columns: For each record its encoded columns by name.
        num_loss_tokens, num_sequences, num_groups: Of the whole step, over all ranks.
        mean_lag, max_lag: Over the records of all ranks, step minus version of the oldest token.
    """

    step: int
    lease_token: int
    micro_batches: tuple[MicroBatchPlan, ...]
    records: Mapping[str, bytes]
    columns: Mapping[str, Mapping[str, bytes]]
    num_loss_tokens: int
    num_sequences: int
    num_groups: int
    mean_lag: float
    max_lag: int


class BlockingBufferClient:
    """Takes and commits batches; for blocking code, one client a rank.

    Every call is retried while the server is not reachable and time is left: taking a step twice gives the same lease,
    and a commit counts once.

    Args:
        channel: Owned by the caller.
        table: The table.
        consumer_id: The learner as a whole; all its ranks use the same.
        incarnation: Of the learner; a newer one fences the older.
        rank, num_ranks: Which share of each batch is wanted.
        sharing_hidden_size: Hidden size of a model that computes the prompt of a group once, so that plans keep its
            samples together; 0: it cannot.
        outage_s: Longest time for which a server that cannot be reached is tried again, within each call's own limit.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        *,
        table: str = "train",
        consumer_id: str = "learner",
        incarnation: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        sharing_hidden_size: int = 0,
        outage_s: float = math.inf,
    ) -> None:
        self._outage_s = outage_s
        self._stub = rpc.BufferServiceStub(channel)
        self._table = table
        self._consumer_id = consumer_id
        self._incarnation = incarnation
        self._rank = rank
        self._num_ranks = num_ranks
        self._sharing_hidden_size = sharing_hidden_size
        self._rng = random.Random()

    def take(self, step: int, deadline_s: float) -> TakenBatch:
        """Lease the batch of a step and fetch this rank's records. Blocks until it is there.

        Raises:
            DeadlineError: It was not there within `deadline_s` seconds; names what is missing.
            FencedError: A newer incarnation is at work, or the step is committed.
            ActorLostError: The server was not reachable until the deadline.
            FormatError: What came is not what the plan says.
        """
        request = pb.TakeRequest(
            table=self._table,
            step=step,
            consumer_id=self._consumer_id,
            incarnation=self._incarnation,
            rank=self._rank,
            num_ranks=self._num_ranks,
            sharing_hidden_size=self._sharing_hidden_size,
        )
        return self._retried(
            f"taking the batch of step {step}",
            deadline_s,
            lambda left_s: _collect(self._stub.Take(request, timeout=left_s)),
        )

    def commit(
        self, step: int, lease_token: int, skipped: bool = False, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> PolicyVersion:
        """Consume the batch of a step; returns the version after it. Again with the same token: the same answer.

        Args:
            step: The step.
            lease_token: Of the batch.
            skipped: The step changed no weights; it counts all the same.
            timeout_s: Seconds until it is given up.

        Raises:
            FencedError: The lease is no longer the current one; nothing was consumed.
            ActorLostError: The server was not reachable in time.
        """
        request = pb.CommitRequest(table=self._table, step=step, lease_token=lease_token, skipped=skipped)
        answer = self._retried(
            f"committing step {step}", timeout_s, lambda left_s: self._stub.Commit(request, timeout=left_s)
        )
        return version_from_proto(answer.version)

    def release(self, step: int, lease_token: int, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Give the batch of a step back untrained.

        Raises:
            FencedError: The lease is no longer the current one.
            ActorLostError: The server was not reachable in time.
        """
        request = pb.ReleaseRequest(table=self._table, step=step, lease_token=lease_token)
        self._retried(f"releasing step {step}", timeout_s, lambda left_s: self._stub.Release(request, timeout=left_s))

    def stats(self, *, timeout_s: float = CALL_TIMEOUT_S) -> BufferStats:
        """The table's statistics.

        Raises:
            ActorLostError: The server was not reachable in time.
        """
        request = pb.GetStatsRequest(table=self._table)
        answer = self._retried(
            "asking for statistics", timeout_s, lambda left_s: self._stub.GetStats(request, timeout=left_s)
        )
        return stats_from_proto(answer)

    def _retried(self, doing: str, timeout_s: float, call: Callable[[float], Answer]) -> Answer:
        deadline = Deadline.after(time.monotonic(), timeout_s)
        gone = Deadline()
        attempt = 0
        while True:
            began_s = time.monotonic()
            try:
                return call(deadline.remaining(time.monotonic()))
            except grpc.RpcError as failure:
                error = error_from_rpc(failure, f"{doing} of table {self._table!r}")
                now_s = time.monotonic()
                if attempt == 0 or now_s - began_s > self._outage_s:  # the server was there until now
                    gone = Deadline.earliest(deadline, Deadline.after(now_s, self._outage_s))
                delay_s = _RETRY.next_delay(attempt, self._rng, now_s, gone)
                if not isinstance(error, ActorLostError) or delay_s is None:
                    raise error from failure
                attempt += 1
                time.sleep(delay_s)


def _collect(answers: Iterable[pb.TakeResponse]) -> TakenBatch:
    """Put a rank's batch together from the stream of answers."""
    records: dict[str, bytes] = {}
    columns: dict[str, dict[str, bytes]] = {}
    assembler = Assembler()
    batch: pb.LeasedBatch | None = None
    for answer in answers:
        if answer.HasField("batch"):
            batch = answer.batch
        for whole in whole_records(assembler, answer.records):
            records[whole.header.record_id] = whole.data
            columns[whole.header.record_id] = {}
        for column in answer.columns:
            columns[column.record_id][column.name] = column.data
    if batch is None:
        raise FormatError("the batch came without its plan")
    micro_batches = tuple(micro_batch_from_proto(plan) for plan in batch.micro_batches)
    planned = [record_id for micro_batch in micro_batches for record_id in micro_batch.record_ids]
    if list(records) != planned:
        raise FormatError(f"the plan of step {batch.step} names {len(planned)} records, and {len(records)} came")
    return TakenBatch(
        step=batch.step,
        lease_token=batch.lease_token,
        micro_batches=micro_batches,
        records=records,
        columns=columns,
        num_loss_tokens=batch.num_loss_tokens,
        num_sequences=batch.num_sequences,
        num_groups=batch.num_groups,
        mean_lag=batch.mean_lag,
        max_lag=batch.max_lag,
    )
