"""Where the elements of a block lie in a flattened tensor."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.actors.learner.shard_runs import runs_of_block, shard_runs


def block(draw: st.DrawFn) -> tuple[list[list[int]], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    own = [sorted(draw(st.sets(st.integers(0, max(size - 1, 0)), max_size=size))) if size else [] for size in shape]
    return own, shape


@given(st.composite(block)())
def test_runs_name_the_elements_of_any_block_in_row_major_order(
    given_block: tuple[list[list[int]], Sequence[int]],
) -> None:
    own, shape = given_block
    runs = runs_of_block([np.array(indices, np.int64) for indices in own], shape)
    flat = np.arange(int(np.prod(shape))).reshape(shape)
    for dim, indices in enumerate(own):
        flat = np.take(flat, indices, axis=dim)
    found = [index for start, count in runs for index in range(start, start + count)]
    assert found == flat.reshape(-1).tolist()
    assert all(first + count != second for (first, count), (second, _) in itertools.pairwise(runs))


def test_a_cut_along_the_first_dimension_is_one_run_and_along_the_second_one_a_row() -> None:
    rows, columns = np.arange(4), np.arange(6)
    assert runs_of_block([rows[1:3], columns], (4, 6)) == ((6, 12),)
    assert runs_of_block([rows[:2], columns[2:4]], (4, 6)) == ((2, 2), (8, 2))


def test_a_whole_parameter_is_one_run_and_an_empty_one_none() -> None:
    assert shard_runs(torch.zeros(3, 4)) == ((0, 12),)
    assert shard_runs(torch.zeros(())) == ((0, 1),)
    assert shard_runs(torch.zeros(0, 4)) == ()
