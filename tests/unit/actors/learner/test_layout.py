from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.actors.learner.layout import LayoutMode, RowLayout, lay_out
from headrace.actors.learner.packing import build_micro_batch
from headrace.engine.types import MicroBatch, Trajectory

MakeRecord = Callable[..., Trajectory]


def visible_tokens(layout: RowLayout, source: int) -> list[tuple[int, int]]:
    """(position, token) pairs that a place sees, in order of position."""
    width = layout.token_ids.shape[1]
    row, column = divmod(source, width)
    sees = np.arange(width) <= column if layout.attention is None else layout.attention[row, column]
    pairs = zip(layout.position_ids[row][sees].tolist(), layout.token_ids[row][sees].tolist(), strict=True)
    return sorted(pairs)


def assert_each_loss_token_sees_exactly_what_precedes_it(packed: MicroBatch, layout: RowLayout) -> None:
    assert sorted(layout.target.tolist()) == np.flatnonzero(packed.loss_mask).tolist()
    for target, source in zip(layout.target.tolist(), layout.source.tolist(), strict=True):
        start = target - int(packed.position_ids[target])
        before = packed.token_ids[start:target].tolist()
        assert visible_tokens(layout, source) == list(enumerate(before))


def test_samples_of_one_prompt_share_it(make_record: MakeRecord) -> None:
    prompt = list(range(10, 55))
    records = [make_record(prompt, [100 + i] * 12) for i in range(8)]
    packed = build_micro_batch(records, [1.0] * 8, step=0)
    layout = lay_out(packed, hidden_size=576)
    assert layout.token_ids.shape == (1, 45 + 8 * 11)
    assert_each_loss_token_sees_exactly_what_precedes_it(packed, layout)


def test_plain_mode_puts_one_sequence_in_a_row_without_a_mask(make_record: MakeRecord) -> None:
    packed = build_micro_batch([make_record([1, 2], [3, 4]), make_record([1, 2], [5])], [1.0, 1.0], step=0)
    layout = lay_out(packed, hidden_size=8, mode="plain")
    assert layout.attention is None
    assert layout.token_ids.shape == (2, 3)
    assert_each_loss_token_sees_exactly_what_precedes_it(packed, layout)


def test_one_long_sequence_does_not_make_short_ones_pay_for_its_width(make_record: MakeRecord) -> None:
    lengths = [2000, *[50] * 30]
    packed = build_micro_batch([make_record([i + 1], [9] * n) for i, n in enumerate(lengths)], [1.0] * 31, step=0)
    layout = lay_out(packed, hidden_size=896)
    assert layout.token_ids.size <= 4000
    assert_each_loss_token_sees_exactly_what_precedes_it(packed, layout)


def test_sequences_without_loss_and_tails_after_the_last_loss_token_are_not_computed(make_record: MakeRecord) -> None:
    records = [make_record([1, 2], [3, 4, 5, 6], mask=[1, 0, 1, 0]), make_record([7], [8], mask=[0])]
    packed = build_micro_batch(records, [1.0, 1.0], step=0)
    layout = lay_out(packed, hidden_size=8)
    assert layout.token_ids.tolist() == [[1, 2, 3, 4]]
    assert layout.target.tolist() == [2, 4]


def test_a_micro_batch_without_loss_still_has_one_place_to_run(make_record: MakeRecord) -> None:
    for packed in (
        build_micro_batch([], [], step=0),
        build_micro_batch([make_record([3], [4], mask=[0])], [1.0], step=0),
    ):
        layout = lay_out(packed, hidden_size=8)
        assert layout.token_ids.shape == (1, 1) and layout.source.tolist() == [0] and layout.target.size == 0


def test_the_layout_shares_what_the_plan_says_and_nothing_else(make_record: MakeRecord) -> None:
    prompt = list(range(10, 55))
    records = [make_record(prompt, [100 + i] * 12) for i in range(8)]
    packed = build_micro_batch(records, [1.0] * 8, step=0, shared=(4, 4))
    layout = lay_out(packed, hidden_size=576)
    assert (layout.token_ids == 10).sum() == 2  # two copies of the prompt, though all eight begin alike
    assert layout.token_ids.size == 2 * (45 + 4 * 11)
    assert_each_loss_token_sees_exactly_what_precedes_it(packed, layout)
    alone = lay_out(build_micro_batch(records, [1.0] * 8, step=0, shared=(1,) * 8), hidden_size=576)
    assert alone.token_ids.size == 8 * 56


def test_a_planned_unit_is_not_divided_if_that_computes_more_tokens(make_record: MakeRecord) -> None:
    records = [make_record([7] * 100, [100 + i] * 400) for i in range(4)]
    found = lay_out(build_micro_batch(records, [1.0] * 4, step=0), hidden_size=64)
    assert found.token_ids.size == 4 * 499  # cheaper, as far as time goes
    planned = build_micro_batch(records, [1.0] * 4, step=0, shared=(4,))
    layout = lay_out(planned, hidden_size=64)
    assert layout.token_ids.size == 100 + 4 * 399
    assert_each_loss_token_sees_exactly_what_precedes_it(planned, layout)


def test_partial_continuation_a_masked_beginning_of_its_own_does_not_keep_a_branch_from_its_prompt(
    make_record: MakeRecord,
) -> None:
    prompt = list(range(10, 50))
    whole = make_record(prompt, [7] * 10)
    resumed = make_record(prompt, [8] * 10, mask=[0] * 6 + [1] * 4)
    packed = build_micro_batch([whole, resumed], [1.0] * 2, step=0, shared=(2,))
    layout = lay_out(packed, hidden_size=576)
    assert layout.token_ids.size == 40 + 9 + 9
    assert_each_loss_token_sees_exactly_what_precedes_it(packed, layout)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drawn=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1)),
        min_size=1,
        max_size=4,
    ),
    hidden=st.sampled_from([1, 64, 4096]),
)
def test_any_planned_batch_is_laid_out_within_the_width_of_its_units(
    make_record: MakeRecord, drawn: list[tuple[int, list[list[int]]]], hidden: int
) -> None:
    records = [
        make_record([unit] * prompt, [10 * index + at for at in range(len(mask))], mask=mask)
        for unit, (prompt, masks) in enumerate(drawn)
        for index, mask in enumerate(masks)
    ]
    shared = tuple(len(masks) for _, masks in drawn)
    packed = build_micro_batch(records, [1.0] * len(records), step=0, shared=shared)
    layout = lay_out(packed, hidden_size=hidden)
    if packed.loss_mask.any():
        assert_each_loss_token_sees_exactly_what_precedes_it(packed, layout)
    widths = [prompt + sum(len(mask) for mask in masks) for prompt, masks in drawn]
    assert layout.token_ids.size <= len(widths) * max(widths)


samples = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 4), st.lists(st.integers(0, 1), min_size=1, max_size=6)),
    min_size=1,
    max_size=10,
)


@pytest.mark.parametrize("mode", ["auto", "plain"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(samples=samples, hidden=st.sampled_from([1, 64, 4096]))
def test_any_batch_is_laid_out_so_that_nothing_else_is_seen(
    make_record: MakeRecord, mode: LayoutMode, samples: list[tuple[int, int, list[int]]], hidden: int
) -> None:
    records = [
        make_record([which] * length, [10 * index + at for at in range(len(mask))], mask=mask)
        for index, (which, length, mask) in enumerate(samples)
    ]
    packed = build_micro_batch(records, [1.0] * len(records), step=0)
    layout = lay_out(packed, hidden_size=hidden, mode=mode)
    if packed.loss_mask.any():
        assert_each_loss_token_sees_exactly_what_precedes_it(packed, layout)
    if layout.attention is not None:
        assert layout.attention.any(axis=-1).all()
