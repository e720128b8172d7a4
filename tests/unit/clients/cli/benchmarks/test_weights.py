"""The benchmark of weight updates: its states resemble training, and its figures are those that the page names."""

import json
import math
from typing import Any

import numpy as np
import pytest

from headrace.clients.cli.benchmarks import weights, weights_model
from headrace.engine.weights.layout import BUCKET_ELEMENTS


@pytest.fixture(scope="module")
def model() -> weights_model.Model:
    # Smaller buckets: the bytes of a changed element hardly depend on their size.
    return weights_model.Model(2, BUCKET_ELEMENTS // 16)


@pytest.mark.parametrize("share", [0.0098, 0.1, 0.34])
def test_changes_are_as_many_as_wanted_and_most_are_of_one_ulp(model: weights_model.Model, share: float) -> None:
    states = model.states(share)
    elements = sum(map(len, states.base))
    assert states.changed / elements == pytest.approx(share, rel=0.1)
    assert 0.72 <= states.one_ulp <= 0.91


def test_rounding_to_bfloat16_is_to_the_nearest_and_ties_go_to_even() -> None:
    bits = np.array([0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0xBF818000], np.uint32)
    assert weights_model.published(bits.view(np.float32)).tolist() == [0x3F80, 0x3F80, 0x3F80, 0x3F81, 0x3F82, 0xBF82]


def test_the_bytes_are_within_what_is_promised_and_every_figure_is_a_number(model: weights_model.Model) -> None:
    figures: Any = weights.figures(model, model, 1)
    assert figures["bytes_per_changed_1pct"] <= 1.4
    assert figures["full_over_delta_bytes_1pct"] >= 130
    assert figures["bytes_per_changed_34pct"] <= 0.85
    if "bytes_over_xor_zstd" in figures:
        assert figures["bytes_over_xor_zstd"] <= 0.55
    assert all(math.isfinite(float(leaf)) for leaf in _leaves(json.loads(json.dumps(figures))))


def _leaves(tree: Any) -> list[float]:
    return [leaf for part in tree.values() for leaf in _leaves(part)] if isinstance(tree, dict) else [tree]
