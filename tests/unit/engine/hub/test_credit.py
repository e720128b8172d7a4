"""Credit on the hub: raw scores stay, shaped rewards give credit, per group or over the whole lease."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from headrace.engine.config import Config
from headrace.engine.errors import InputError
from headrace.engine.hub.credit import (
    LeasedRecord,
    assign_credit,
    build_batch,
    columns_before_lease,
    encode_credit,
    raw_rewards,
    shaped_rewards,
)
from headrace.engine.interfaces import GroupRewards, LossInputs, LossOutput
from headrace.engine.records import decode_column, encode_column, encode_trajectory, header_of
from headrace.engine.testing.samples import make_trajectory
from headrace.engine.types import AlgorithmTraits, MicroBatch


class HalvedAndCentred:
    """Shapes rewards to half, and centres them over all that it is given at once."""

    def __init__(self, traits: AlgorithmTraits) -> None:
        self.traits = traits

    def shape_rewards(self, group: GroupRewards) -> npt.NDArray[np.float64]:
        return group.rewards / 2

    def keeps(self, group: GroupRewards) -> bool:
        return True

    def assign_credit(self, groups: Sequence[GroupRewards]) -> list[npt.NDArray[np.float32]]:
        mean = np.concatenate([group.rewards for group in groups]).mean()
        return [(group.rewards - mean).astype(np.float32) for group in groups]

    def token_advantages(self, micro_batch: MicroBatch) -> npt.NDArray[np.float32]:
        return micro_batch.advantages

    def loss(self, inputs: LossInputs) -> LossOutput:
        raise AssertionError("the hub needs no loss")


def group_of(group_id: str, scores: Sequence[float], credit: Sequence[float] | None = None) -> list[LeasedRecord]:
    records: list[LeasedRecord] = []
    for index, score in enumerate(scores):
        sample = make_trajectory(
            num_response=3 + index,
            record_id=f"{group_id}/{index}/0",
            group_id=group_id,
            sample_index=index,
            group_size=len(scores),
        )
        columns: dict[str, bytes] = {"reward": encode_column("reward", np.array(score, np.float64))}
        if credit is not None:
            columns["advantage"] = encode_credit(credit[index])
        records.append(LeasedRecord(header=header_of(sample), data=encode_trajectory(sample), columns=columns))
    return records


def advantages(records: Mapping[str, LeasedRecord]) -> dict[str, float]:
    return {name: float(decode_column(record.columns["advantage"])[1]) for name, record in records.items()}


def test_scores_stay_raw_and_credit_comes_from_shaped_rewards() -> None:
    method = HalvedAndCentred(AlgorithmTraits())
    raw = raw_rewards([record.header for record in group_of("a", [1.0, 3.0])], [1.0, 3.0])
    shaped = shaped_rewards(raw, method)
    assert raw.rewards.tolist() == [1.0, 3.0]
    assert raw.lengths.tolist() == [3, 4]
    assert shaped.rewards.tolist() == [0.5, 1.5]
    assert assign_credit([shaped], method)[0].tolist() == [-0.5, 0.5]


def test_credit_of_a_batch_sees_every_group_of_the_lease() -> None:
    method = HalvedAndCentred(AlgorithmTraits(credit_scope="batch"))
    assert columns_before_lease(method) == ("reward",)
    groups = [group_of("a", [0.0, 2.0]), group_of("b", [4.0, 6.0])]
    batch = build_batch(groups, step=5, lease_token=9, config=Config(), algorithm=method)
    assert advantages(batch.records) == {"a/0/0": -1.5, "a/1/0": -0.5, "b/0/0": 0.5, "b/1/0": 1.5}
    assert [(s.score, s.reward) for s in batch.samples] == [(0.0, 0.0), (2.0, 1.0), (4.0, 2.0), (6.0, 3.0)]


@pytest.mark.parametrize(("skips", "trained"), [(True, {"a/1/0"}), (False, {"a/0/0", "a/1/0"})])
def test_samples_without_credit_count_in_the_totals_and_take_a_pass_only_where_it_matters(
    skips: bool, trained: set[str]
) -> None:
    method = HalvedAndCentred(AlgorithmTraits(skips_zero_credit=skips))
    assert columns_before_lease(method) == ("reward", "advantage")
    batch = build_batch(
        [group_of("a", [0.0, 1.0], [0.0, 0.5])], step=5, lease_token=9, config=Config(), algorithm=method
    )
    assert set(batch.records) == trained
    assert {name for rank in batch.plan.ranks for part in rank.micro_batches for name in part.record_ids} == trained
    # The last token of each sample was appended, not sampled.
    assert (batch.plan.num_loss_tokens, batch.plan.num_sequences, batch.plan.num_groups) == (2 + 3, 2, 1)


def test_a_batch_without_any_credit_still_has_one_pass_on_each_rank() -> None:
    config = msgspec.structs.replace(Config(), learner=msgspec.structs.replace(Config().learner, num_ranks=3))
    method = HalvedAndCentred(AlgorithmTraits(skips_zero_credit=True))
    batch = build_batch([group_of("a", [1.0, 1.0], [0.0, 0.0])], step=5, lease_token=9, config=config, algorithm=method)
    assert [len(rank.micro_batches) for rank in batch.plan.ranks] == [1, 1, 1]
    assert batch.plan.num_loss_tokens == 5


@pytest.mark.parametrize("skips", [True, False])
def test_groups_without_credit_are_counted_also_where_they_take_a_forward_pass(skips: bool) -> None:
    method = HalvedAndCentred(AlgorithmTraits(skips_zero_credit=skips))
    groups = [group_of("a", [1.0, 1.0], [0.0, 0.0]), group_of("b", [0.0, 1.0, 2.0], [-1.0, 0.0, 1.0])]
    batch = build_batch(groups, step=5, lease_token=9, config=Config(), algorithm=method)
    assert batch.num_without_credit == 1


def test_a_method_of_whole_groups_never_gets_a_part_of_one() -> None:
    """Two samples of 6 and 7 tokens: together they need a budget of 13."""
    method = HalvedAndCentred(AlgorithmTraits(whole_groups=True))
    for budget, allowed in ((12, False), (13, True)):
        learner = msgspec.structs.replace(Config().learner, token_budget=budget)
        config = msgspec.structs.replace(Config(), learner=learner)
        groups = [group_of("a", [0.0, 1.0], [-1.0, 1.0])]
        if allowed:
            build_batch(groups, step=5, lease_token=9, config=config, algorithm=method)
        else:
            with pytest.raises(
                InputError, match=r"'a' has 13 tokens .* learner.token_budget = 12: raise it to at least 13"
            ):
                build_batch(groups, step=5, lease_token=9, config=config, algorithm=method)
