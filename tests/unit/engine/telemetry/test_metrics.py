import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from headrace.engine.errors import SchemaError
from headrace.engine.telemetry import METRIC_KEYS, MetricAccumulator, MetricKey, MetricsWriter
from headrace.engine.telemetry.metric_keys import declared

DOCS = Path(__file__).parents[4] / "docs" / "metrics.md"


class FixedClock:
    def monotonic(self) -> float:
        return 5.0

    def wall(self) -> float:
        return 1_790_000_000.1234


def test_partial_last_batch_counts_for_the_items_it_holds() -> None:
    parts = MetricAccumulator()
    for rewards in ([1.0] * 4, [1.0] * 4, [0.0] * 2):
        parts.add("eval/rewards/mean", float(np.mean(rewards)), weight=len(rewards))
        parts.add("eval/num_prompts", len(rewards))
    assert parts.take() == {"eval/rewards/mean": pytest.approx(0.8), "eval/num_prompts": 10}


def test_each_key_is_reduced_as_it_is_declared() -> None:
    parts = MetricAccumulator([MetricKey("mine/low", "min", "", "")])
    for value in (2.0, 3.0, 1.0):
        parts.add_all(
            {"timing_s/train": value, "off_policy/max": value, "mine/low": value, "off_policy/in_queue": value}
        )
        parts.add_all({"actor/pg_loss": value}, weight=value)
    assert parts.take() == {
        "timing_s/train": 6.0,
        "off_policy/max": 3.0,
        "mine/low": 1.0,
        "off_policy/in_queue": 1.0,
        "actor/pg_loss": pytest.approx(14 / 6),
    }
    assert parts.take() == {}


def test_a_part_that_stands_for_nothing_changes_nothing() -> None:
    parts = MetricAccumulator()
    parts.add("actor/pg_loss", math.nan, weight=0)
    assert parts.take() == {}
    parts.add("actor/pg_loss", 2.0, weight=3)
    parts.add("actor/pg_loss", math.nan, weight=0)
    assert parts.take() == {"actor/pg_loss": 2.0}


def test_a_key_that_nobody_declared_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(SchemaError, match="'off_policy/mena' is not declared; the nearest is 'off_policy/mean'"):
        MetricAccumulator().add("off_policy/mena", 1.0)
    with pytest.raises(SchemaError, match="pass a MetricKey"):
        MetricAccumulator().add("actor/", 1.0)


def test_an_exact_key_goes_before_a_family_and_a_callers_key_before_both() -> None:
    assert declared("timing_s/step").name == "timing_s/step"
    assert declared("timing_s/train").name == "timing_s/*"
    assert declared("actor/special", [MetricKey("actor/special", "max", "", "")]).reduction == "max"


def test_a_row_is_one_line_of_finite_numbers_or_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, FixedClock())
    values = {"actor/pg_loss": np.float32(0.5), "perf/mfu": None, "buffer/add": np.int64(3)}
    written = {"actor/pg_loss": 0.5, "perf/mfu": None, "buffer/add": 3, "actor/grad_norm": None}
    assert writer.write(1, {**values, "actor/grad_norm": math.inf}) == written
    assert json.loads(path.read_text()) == {"step": 1, "time": 1_790_000_000.123, **written}
    with pytest.raises(SchemaError, match="may not be called 'step'"):
        writer.write(2, {"step": 2.0})
    writer.close()


def test_the_page_on_metrics_lists_what_is_declared_and_nothing_else() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \| (\w+) \| (.*) \|$", DOCS.read_text(), flags=re.MULTILINE)
    assert rows == [(key.name, key.unit, key.reduction, key.text) for key in METRIC_KEYS]
