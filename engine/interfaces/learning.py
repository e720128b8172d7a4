"""The roles that learn: the trainer, and the method that it applies."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from headrace.engine.types import (
    AlgorithmTraits,
    MicroBatch,
    PolicyVersion,
    StepBatch,
    StepResult,
    WeightUpdate,
)

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


@runtime_checkable
class TrainerBackend(Protocol):
    """Holds the trained weights, in the trainer's process. Synchronous: torch never runs on a loop that serves.

    With several ranks each method is collective: every rank calls it, in the same order.
    """

    def logprobs(self, micro_batch: MicroBatch) -> npt.NDArray[np.float32]:
        """Current log-probabilities, float32 [N], at each sequence's temperature; 0 where there is no score."""
        ...

    def step(self, batch: StepBatch) -> StepResult:
        """Forward, backward and update over all micro-batches; returns the version after it.

        Raises:
            NonFiniteStreakError: The configured number of steps in a row was skipped.
        """
        ...

    def export_update(self, since: PolicyVersion | None, payload_dir: Path) -> WeightUpdate:
        """Write this rank's part of the current state as an update.

        Args:
            since: The version of the last exported update, if the hub took it: a delta may start from it. None asks
                for a keyframe, which is a right answer to any other, too; but all ranks give the same.
            payload_dir: Where the payload's file goes; the hub removes it when nobody needs it any more.

        Raises:
            StorageError: There is no room in `payload_dir`.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and RNG below `folder`; returns when they are on disk."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, on any number of ranks.

        Raises:
            FormatError: The folder is not a complete checkpoint.
        """
        ...

    def close(self) -> None:
        """Leave the process group. May be called twice."""
        ...


class StagedUpdate(Protocol):
    """One version, copied, so that it can be written while the trainer goes on. Not collective."""

    @property
    def version(self) -> PolicyVersion:
        """What the update leads to."""
        ...

    def write(self, payload_dir: Path, *, full: bool = False) -> WeightUpdate:
        """Write this rank's part; may be repeated, with another folder or in full. Blocks; runs in any thread.

        A `WeightPart` tells the hub what the update cost, besides.

        Args:
            payload_dir: As for `export_update`.
            full: As a keyframe, because the delta was refused.

        Raises:
            StorageError: There is no room in `payload_dir`.
        """
        ...

    def settle(self, *, accepted: bool) -> None:
        """Say whether the hub took what was written last; frees what is not needed any more."""
        ...


@runtime_checkable
class OverlappedTrainer(Protocol):
    """What a `TrainerBackend` offers besides if its updates are to be published while the next step runs."""

    def stage_update(self, since: PolicyVersion | None) -> StagedUpdate:
        """Copy the current state. Collective; blocks for the copy. `since` as for `export_update`."""
        ...


class GroupRewards(Protocol):
    """One whole group as credit assignment sees it."""

    @property
    def group_id(self) -> str: ...

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        """float64 [G], the shaped rewards."""
        ...

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """int64 [G], response tokens."""
        ...


@runtime_checkable
class Algorithm(Protocol):
    """Credit and loss of one RL method. Pure: no process group, no I/O, no global generator.

    The hub calls `shape_rewards`, `keeps` and `assign_credit`, in this order and without torch; the ranks call
    `token_advantages` and `loss`. Made from an `AlgorithmConfig` alone, in which the run's limits are filled in.
    """

    @property
    def traits(self) -> AlgorithmTraits:
        """What the runtime has to know; the same for the whole run."""
        ...

    def shape_rewards(self, group: GroupRewards) -> npt.NDArray[np.float64]:
        """The rewards that credit is assigned from, float64 [G]; `group.rewards` are the scorer's raw values.

        Raises:
            InputError: A reward is not finite, or the group is empty.
        """
        ...

    def keeps(self, group: GroupRewards) -> bool:
        """Whether a group is trained on, by its raw rewards. A group that is not is replaced by another prompt's."""
        ...

    def assign_credit(self, groups: Sequence[GroupRewards]) -> list[npt.NDArray[np.float32]]:
        """Scalar credit from shaped rewards: float32 [G] for each group, in order.

        Gets one group as soon as it is scored, or with `traits.credit_scope` "batch" all groups of a step at once.

        Raises:
            InputError: A reward is not finite, or a group is empty.
        """
        ...

    def token_advantages(self, micro_batch: MicroBatch) -> npt.NDArray[np.float32]:
        """Token-level credit on the ranks, float32 [N]; methods with scalar credit spread it.

        Raises:
            InputError: The micro-batch lacks a column of `traits.columns`.
        """
        ...

    def loss(self, inputs: "LossInputs") -> "LossOutput":
        """The part of the loss that this micro-batch contributes, already divided by the global counts."""
        ...


class LossInputs(Protocol):
    """What a loss sees of one micro-batch; tensors over N tokens, aligned with `MicroBatch`."""

    @property
    def logprobs(self) -> Tensor:
        """float32 [N], current policy, with gradient."""
        ...

    @property
    def entropy(self) -> Tensor | None:
        """float32 [N], or None when no entropy term is asked for."""
        ...

    @property
    def proximal_logprobs(self) -> Tensor:
        """float32 [N], detached; the detached current policy with one update a batch."""
        ...

    @property
    def behaviour_logprobs(self) -> Tensor:
        """float32 [N], of the sampler."""
        ...

    @property
    def reference_logprobs(self) -> Tensor | None:
        """float32 [N], or None when no KL term is asked for."""
        ...

    @property
    def teacher_logprobs(self) -> Tensor | None:
        """float32 [N], of a teacher; None where the method has none."""
        ...

    @property
    def advantages(self) -> Tensor:
        """float32 [N]."""
        ...

    @property
    def loss_mask(self) -> Tensor:
        """bool [N]."""
        ...

    @property
    def sequence_ids(self) -> Tensor:
        """int64 [N]."""
        ...

    @property
    def group_ids(self) -> Tensor | None:
        """int64 [S], which sequences belong together; numbers from 0 within the micro-batch."""
        ...

    @property
    def kl_coef(self) -> float:
        """Weight of the KL term in this step; an adaptive controller moves it."""
        ...

    @property
    def num_loss_tokens(self) -> int:
        """Loss tokens of the whole step, over all ranks and micro-batches."""
        ...

    @property
    def num_sequences(self) -> int:
        """Sequences with a loss token in the whole step."""
        ...

    @property
    def num_groups(self) -> int:
        """Groups in the whole step."""
        ...


class LossOutput(Protocol):
    """A scalar to call `backward` on, and sums for the metrics."""

    @property
    def loss(self) -> Tensor:
        """float32 [], connected to the graph even when no token takes part."""
        ...

    @property
    def sums(self) -> dict[str, Tensor]:
        """Sums over this micro-batch's loss tokens; the trainer adds them up and divides by the global count."""
        ...

    @property
    def maxima(self) -> dict[str, Tensor]:
        """Largest values over this micro-batch's loss tokens; the trainer takes the largest over all."""
        ...

    @property
    def denominator(self) -> float:
        """What `loss` was divided by: planned tokens, sequences or groups of the whole step; the same on every rank."""
        ...

    @property
    def rejected(self) -> Tensor:
        """float32 [], how many of those units in this micro-batch were rejected and carry no loss.

        Known only after the forward pass, so the trainer makes up for it: it multiplies the accumulated gradient by
        denominator / (denominator - rejected over all micro-batches and ranks), and skips a step that has nothing left.
        """
        ...
