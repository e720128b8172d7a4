"""Leases of the hub: what a batch is made of, and what happens when it is given back."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from headrace.buffers.async_table import AsyncTable
from headrace.buffers.table import Table
from headrace.engine.config import AlgorithmConfig
from headrace.engine.hub.batches import HubBuffer
from headrace.engine.hub.evaluation import EvalFlow
from headrace.engine.hub.state import HubState
from headrace.engine.plugins import load_entry_point
from headrace.engine.records import decode_column, encode_column, encode_trajectory, header_of
from headrace.engine.testing.samples import make_trajectory
from headrace.engine.types import PolicyVersion, Prompt, VersionSpan

START = PolicyVersion(0, 0)


@dataclass(frozen=True, kw_only=True)
class Order:
    table: str = "train"
    step: int = 0
    consumer_id: str = "learner-0"
    incarnation: int = 0
    rank: int = 0
    num_ranks: int = 1
    deadline_s: float | None = 30.0
    sharing_hidden_size: int = 0


def buffer_with_group(state: HubState, method: str, rewards: list[float]) -> HubBuffer:
    """A buffer whose table holds one scored group, and its method."""
    algorithm = cast(Any, load_entry_point("headrace.algorithms", method))(AlgorithmConfig(name=method))
    state.train = AsyncTable(Table("train", required_columns=("reward",)))
    group = state.flow.admit(Prompt(prompt_id="p", token_ids=(1,)))
    state.flow.enlist("w", 4, START)
    assert state.flow.next_dispatch() is not None
    buffer = HubBuffer(state, EvalFlow(state.config), algorithm, on_ended=lambda ended: None)
    spans = (VersionSpan(version=START, num_tokens=3),)
    for index, reward in enumerate(rewards):
        sample = make_trajectory(
            num_response=3,
            record_id=f"{group.group_id}/{index}/0",
            group_id=group.group_id,
            sample_index=index,
            group_size=len(rewards),
            spans=spans,
        )
        assert buffer.offer_record("train", header_of(sample), encode_trajectory(sample)).accepted
        column = encode_column("reward", np.array(reward, np.float64))
        assert buffer.put_column("train", sample.record_id, "reward", column).accepted
    assert state.flow.generated(group.group_id, 0, [spans] * len(rewards))
    state.flow.ready(group.group_id, 0)
    return buffer


async def test_credit_of_a_batch_is_the_same_after_its_lease_was_given_back(hub_state: HubState) -> None:
    buffer = buffer_with_group(hub_state, "reinforce_plus_plus", [1.0, 0.0])
    first = await buffer.take(Order())
    await buffer.release("train", 0, first.lease_token)
    second = await buffer.take(Order())
    assert second.lease_token != first.lease_token
    for batch in (first, second):
        credit = [float(decode_column(record.columns["advantage"])[1]) for record in batch.records.values()]
        assert credit == pytest.approx([1.0, -1.0])
    version = await buffer.commit("train", 0, second.lease_token, skipped=False)
    assert version == PolicyVersion(0, 1)


async def test_a_batch_that_is_leased_twice_counts_once_in_the_figures(hub_state: HubState) -> None:
    buffer = buffer_with_group(hub_state, "reinforce_plus_plus", [1.0, 1.0])
    first = await buffer.take(Order())
    buffer.consumer_lost("learner-0", 0)
    second = await buffer.take(Order(incarnation=1))
    assert first.records == second.records == {}
    await buffer.commit("train", 0, second.lease_token, skipped=False)
    figures = hub_state.reporting.parts.take()
    assert figures["groups/zero_variance"] == 1.0
    assert figures["critic/rewards/mean"] == 1.0
