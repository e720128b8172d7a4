"""The blocking client for a training loop of your own, from torchrun ranks or any other process.

    with TrainerClient(hub_address, rank=rank, num_ranks=world_size) as client:
        for step in range(client.first_step, client.num_steps):
            batch = client.take(step)
            ...  # train on client.samples(batch)
            if rank == 0:
                client.commit(step, batch.lease_token)
            client.publish_tensors(dict(model.named_parameters()), step + 1)  # publish(part), with several ranks

The engine runs with `learner.launch = "external"`; `Engine.hub_address` says where its hub listens. All ranks see the
same lease and plan; each gets its own records. A process that dies gives its lease back when its successor joins.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Self

import msgspec

from headrace.engine.errors import FormatError
from headrace.engine.records import decode_column, decode_trajectory
from headrace.engine.transport.buffer_take import TakenBatch
from headrace.engine.transport.control import BlockingControlClient, Joined, Span
from headrace.engine.transport.learner import LearnerClient
from headrace.engine.transport.tensor_publisher import TensorLike, TensorPublisher, run_publisher
from headrace.engine.transport.weights import WeightPublisher
from headrace.engine.types import PolicyVersion, Trajectory, WeightUpdate
from headrace.v1 import control_pb2 as pb

log = logging.getLogger(__name__)


class TrainingSample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One sample to train on, with its reward and its scalar advantage."""

    trajectory: Trajectory
    reward: float
    advantage: float


class TrainerClient:
    """One rank's line to the hub. Blocking; for one thread. Heartbeats come from a thread of its own."""

    def __init__(self, hub_address: str, *, rank: int = 0, num_ranks: int = 1, member_id: str | None = None) -> None:
        """Nothing is sent before the client is entered.

        Args:
            hub_address: `unix:/path` or `grpc://host:port`.
            rank: 0 .. num_ranks - 1.
            num_ranks: As in `learner.num_ranks`.
            member_id: Unique within the run; `learner-<rank>` by default.
        """
        self._address = hub_address
        self._rank = rank
        self._num_ranks = num_ranks
        self._control = BlockingControlClient(hub_address, pb.ROLE_LEARNER, member_id or f"learner-{rank}")
        self._run: Joined | None = None
        self._line: LearnerClient | None = None
        self._tensors: tuple[WeightPublisher, TensorPublisher] | None = None

    def __enter__(self) -> Self:
        """Join the run; blocks for at most 30 s.

        Raises:
            ActorLostError: The hub is not reachable.
        """
        self._run = self._control.join(self._rank)
        self._line = LearnerClient(self._address, self._control, self._run, self._rank, self._num_ranks)
        self._control.progress.moved("ready", pb.PHASE_READY)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def run(self) -> Joined:
        """The run: its configuration, version, folders and the checkpoint to resume from."""
        assert self._run is not None, "enter the client first"
        return self._run

    @property
    def first_step(self) -> int:
        """The step of the next batch."""
        return self.run.version.version

    @property
    def num_steps(self) -> int:
        """Steps of the run."""
        return self.run.config.run.steps

    def take(self, step: int, deadline_s: float | None = None) -> TakenBatch:
        """Lease the batch of a step and fetch this rank's records; blocks until it is there.

        Args:
            step: Asked for again, it gives the same lease.
            deadline_s: Seconds to wait; `timeouts.no_progress_s` by default.

        Raises:
            DeadlineError: It was not there in time; names what is missing.
            FencedError: A successor is at work, or the step is committed.
            StoppedError: The run is ending; leave the loop.
        """
        self._control.progress.moved(f"waiting for the batch of step {step}")
        limit_s = self.run.config.timeouts.no_progress_s if deadline_s is None else deadline_s
        batch = self._hub.take(step, limit_s)
        self._control.progress.moved(f"training step {step}")
        return batch

    def samples(self, batch: TakenBatch) -> list[TrainingSample]:
        """This rank's samples, decoded, in the plan's order.

        Raises:
            FormatError: A record or column is damaged.
        """
        found: list[TrainingSample] = []
        for record_id, data in batch.records.items():
            columns = {name: decode_column(column)[1] for name, column in batch.columns[record_id].items()}
            if not {"reward", "advantage"} <= columns.keys():
                raise FormatError(f"record {record_id!r} came without its reward and advantage")
            reward, advantage = float(columns["reward"]), float(columns["advantage"])
            found.append(TrainingSample(trajectory=decode_trajectory(data), reward=reward, advantage=advantage))
        return found

    def commit(self, step: int, lease_token: int, *, skipped: bool = False) -> PolicyVersion:
        """Consume the batch of a step, on one rank; returns the version after it.

        Raises:
            FencedError: The lease is no longer the current one; nothing was consumed.
        """
        return self._hub.commit(step, lease_token, skipped)

    def publish(self, part: WeightUpdate) -> bool:
        """Offer this rank's part of the version; True when that sealed it. See `headrace.engine.weights.payload`.

        Raises:
            FencedError: A successor has taken over.
            CorruptUpdateError: The ranks' parts do not fit together.
        """
        return self._hub.publish(part)

    def publish_tensors(self, tensors: Mapping[str, TensorLike], version: int) -> bool:
        """Publish a whole state from a single rank; what changed since the last one travels. Blocks until it is there.

        Args:
            tensors: Under the checkpoint's names, tied ones once: numpy arrays, tensors of any framework, or the name
                of the element type and the bits, as ("bfloat16", uint16 array). They are copied.
            version: Steps that the weights have been trained, as `commit` counts them.

        Returns:
            Whether the version exists now.

        Raises:
            ConfigError: `learner.num_ranks` is not 1.
            InputError: A tensor cannot be published.
            WeightUpdateError: A newer version is published.
            FencedError: A successor has taken over.
            StorageError: There is no room for the payload.
        """
        run = self.run
        if self._tensors is None:
            self._tensors = run_publisher(
                self._address,
                run_id=run.run_id,
                fencing_token=run.fencing_token,
                payload_dir=run.payload_dir,
                run_folder=run.run_folder,
                num_ranks=run.config.learner.num_ranks,
                keyframe_steps=run.config.weights.keyframe_steps,
                say=log.warning,
            )
        return self._tensors[1].publish(tensors, PolicyVersion(run.incarnation, version))

    def report(self, step: int, metrics: dict[str, float], spans: Sequence[Span] = ()) -> None:
        """Finish the row of a step in metrics.jsonl, on one rank; `step` counts finished steps.

        Raises:
            SchemaError: A metric has no declared key; figures of your own go under `actor/`. Nothing was reported.
            ActorLostError: The hub is gone.
        """
        self._hub.report(step, spans, metrics)

    def close(self) -> None:
        """Leave the run and close the channels. May be called twice."""
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._tensors is not None:
            self._tensors[0].close()
            self._tensors = None
        self._control.close()

    @property
    def _hub(self) -> LearnerClient:
        assert self._line is not None, "enter the client first"
        return self._line
