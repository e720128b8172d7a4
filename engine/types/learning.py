"""What the learner works on: plans, packed micro-batches and results."""

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engine.types.policy import PolicyVersion


class MicroBatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Records packed into one micro-batch of one rank; no records means a padding micro-batch.

    Attributes:
        num_tokens: Tokens that are computed, each shared prompt once; padding of rows is not counted.
        shared: Sizes of consecutive sharing units: the first shared[0] records share one copy of their prompt, the next
            shared[1] another one, ...; they add up to all records. Empty: the plan does not say, and the learner shares
            what it finds.
    """

    record_ids: tuple[str, ...]
    num_tokens: int
    shared: tuple[int, ...] = ()


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The micro-batches of one rank, in the order they run."""

    micro_batches: tuple[MicroBatchPlan, ...]


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which record goes to which rank and micro-batch in one step.

    All ranks have the same number of micro-batches; each record appears exactly once.

    Attributes:
        num_loss_tokens: Sum of all loss masks over all ranks; the denominator of the token mean.
        num_sequences: Records with at least one loss token, over all ranks.
        num_groups: Groups in the batch.
    """

    step: int
    ranks: tuple[RankPlan, ...]
    num_loss_tokens: int
    num_sequences: int
    num_groups: int


ColumnName = Literal["reference_logprobs", "teacher_logprobs", "values"]


class AlgorithmTraits(msgspec.Struct, frozen=True, kw_only=True):
    """What the runtime has to know of an RL method.

    Attributes:
        trains_on: "rollouts" of the policy, "preference_pairs" of a table, or "demonstrations".
        credit_scope: Credit needs one "group", or all groups of the "batch" at once.
        min_group_size: Samples of one prompt without which nothing is learnt.
        filters_groups: `keeps` may refuse a group, so that it is replaced.
        skips_zero_credit: A sample with credit 0 has no gradient, so that it needs no forward pass.
        whole_groups: The loss needs all members of a group in one micro-batch.
        columns: What a micro-batch must carry besides the sampler's own columns.
        needs_entropy: The loss reads the entropy.
    """

    trains_on: Literal["rollouts", "preference_pairs", "demonstrations"] = "rollouts"
    credit_scope: Literal["group", "batch"] = "group"
    min_group_size: int = 1
    filters_groups: bool = False
    skips_zero_credit: bool = False
    whole_groups: bool = False
    columns: tuple[ColumnName, ...] = ()
    needs_entropy: bool = False


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Variable-length sequences laid end to end: N tokens of S sequences.

    Arrays over tokens are aligned with token_ids.

    Position i scores the token at i: `logprobs[i]` is log p(token_ids[i] | tokens before it in its sequence). The first
    token of each sequence has no score and loss_mask 0.

    Attributes:
        token_ids: int32 [N], prompt then response of each sequence.
        position_ids: int32 [N], from 0 in each sequence.
        sequence_ids: int32 [N], which sequence a token belongs to, 0..S-1.
        loss_mask: uint8 [N], 1 on response tokens that the policy sampled.
        behaviour_logprobs: float32 [N], nats; 0 where loss_mask is 0.
        advantages: float32 [N], constant over a sequence for scalar credit; 0 where loss_mask is 0.
        temperature: float32 [S], the sampling temperature of each sequence.
        record_ids: S names, in order.
        lags: int32 [S], target step minus oldest version.
        group_ids: int32 [S], which sequences belong to one group, numbered from 0 here; None: each alone.
        reference_logprobs, teacher_logprobs: float32 [N], nats, at the same temperature; None where not asked for.
        values: float32 [N], the critic's, in the state before each token; None without a critic.
        shared: Sizes of consecutive sharing units, S in all: their sequences begin with the same prompt, which is to be
            computed once. Empty: nothing was planned.
    """

    token_ids: npt.NDArray[np.int32]
    position_ids: npt.NDArray[np.int32]
    sequence_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    behaviour_logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    temperature: npt.NDArray[np.float32]
    record_ids: tuple[str, ...]
    lags: npt.NDArray[np.int32]
    group_ids: npt.NDArray[np.int32] | None = None
    reference_logprobs: npt.NDArray[np.float32] | None = None
    teacher_logprobs: npt.NDArray[np.float32] | None = None
    values: npt.NDArray[np.float32] | None = None
    shared: tuple[int, ...] = ()


class StepBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One rank's share of a step, with the global counts that its losses are divided by."""

    step: int
    micro_batches: tuple[MicroBatch, ...]
    num_loss_tokens: int
    num_sequences: int
    num_groups: int


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step did. Metrics are equal on every rank (already reduced).

    Attributes:
        version: The version after the step.
        skipped: The gradient was not finite or no token took part; no weight changed, the version counts all the same.
        metrics: Keys of the design, e.g. `actor/pg_loss`.
    """

    version: PolicyVersion
    skipped: bool
    metrics: dict[str, float]
