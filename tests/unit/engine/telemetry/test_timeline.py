import json
import math
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.errors import StorageError
from headrace.engine.telemetry import Span, Timeline, load_spans, sampling_overlap


def events_by_thread(path: Path) -> dict[str, list[dict[str, Any]]]:
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    out: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            out[names[event["tid"]]].append(event)
    return out


def test_the_trace_has_one_named_thread_a_track_in_microseconds(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "spans.jsonl")
    timeline.add("hub", "checkpoint", 1003.0, 1004.0)
    timeline.add("rollout 10", "sample", 1000.0, 1001.0)
    timeline.add("rollout 2", "sample", 1000.5, 1003.0, {"groups": 4})
    timeline.add("learner", "step", 1001.0, 1002.5, {"step": 1})
    timeline.add("learner", "forward", 1001.0, 1002.0)
    timeline.write(tmp_path / "timeline.json")
    timeline.close()
    threads = events_by_thread(tmp_path / "timeline.json")
    assert list(threads) == ["learner", "rollout 2", "rollout 10", "hub"]
    assert [(e["name"], e["ts"], e["dur"]) for e in threads["learner"]] == [
        ("step", 1e6, 1.5e6),
        ("forward", 1e6, 1e6),
    ]
    assert threads["rollout 2"][0]["args"] == {"groups": 4}


def test_spans_of_a_track_that_cross_go_to_further_threads(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "spans.jsonl")
    for start, end in ((0, 4), (1, 5), (2, 3), (4, 6), (5, 7)):
        timeline.add("rollout 0", f"{start}-{end}", start, end)
    timeline.write(tmp_path / "timeline.json")
    timeline.close()
    threads = events_by_thread(tmp_path / "timeline.json")
    assert {name: [e["name"] for e in held] for name, held in threads.items()} == {
        "rollout 0": ["0-4", "2-3", "4-6"],
        "rollout 0 (2)": ["1-5", "5-7"],
    }


def test_memory_is_bounded_and_no_span_is_lost(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "spans.jsonl", num_recent=10, spill_every=7)
    for i in range(1000):
        timeline.add("rollout 0", "sample", float(i), i + 0.5)
    assert len(timeline._recent) == 10 and len(timeline._pending) < 7  # pyright: ignore[reportPrivateUsage]
    timeline.close()
    assert [span.start_s for span in load_spans(tmp_path / "spans.jsonl")] == [float(i) for i in range(1000)]


def test_a_resumed_run_keeps_the_spans_of_the_earlier_one_and_a_torn_line_is_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    first = Timeline(path)
    first.add("learner", "step", 0.0, 1.0, {"step": 1})
    first.close()
    with path.open("ab") as file:
        file.write(b'{"track": "lear')
    assert len(load_spans(path)) == 1
    second = Timeline(path)
    second.add("learner", "step", 2.0, 3.0, {"step": 2})
    second.close()
    second.close()
    assert [span.detail for span in load_spans(path)] == [{"step": 1}, {"step": 2}]
    path.write_bytes(b"nonsense\n")
    with pytest.raises(StorageError, match="line 1 of"):
        load_spans(path)
    assert load_spans(tmp_path / "missing") == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the always-full device of Linux")
def test_a_full_disk_costs_spans_but_not_the_run(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    path.symlink_to("/dev/full")
    timeline = Timeline(path, spill_every=2)
    for i in range(100):
        timeline.add("hub", "tick", float(i), i + 1.0)
    assert timeline.num_dropped == 100 - 32
    timeline.close()


def test_figures_say_who_idled_and_how_much_of_the_step_was_overlapped(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "spans.jsonl")
    timeline.add("learner", "wait for a batch", 0.0, 2.0)
    timeline.add("learner", "step", 2.0, 8.0, {"step": 1})
    timeline.add("rollout 0", "sample", 0.0, 5.0)
    token = timeline.begin("rollout 1", "sample", 7.0)
    timeline.add("reward", "score", 4.0, 5.0)
    assert timeline.figures(0.0, 10.0) == {
        "idle_ratio/learner": pytest.approx(0.4),
        "idle_ratio/rollout": pytest.approx((0.5 + 0.7) / 2),
        "idle_ratio/reward": pytest.approx(0.9),
        "overlap/sampling": pytest.approx(4 / 6),
    }
    timeline.end(token, 12.0, {"tokens": 3})
    timeline.end(token, 13.0)
    timeline.close()
    assert load_spans(tmp_path / "spans.jsonl")[-1] == Span(
        track="rollout 1", name="sample", start_s=7.0, end_s=12.0, detail={"tokens": 3}
    )


@pytest.mark.parametrize(
    ("track", "name", "detail", "step"),
    [
        ("learner", "step 7", {}, 7),
        ("learner", "step", {"step": 8}, 8),
        ("learner", "step", {}, -1),
        ("learner", "steps to come", {}, None),
        ("learner", "checkpoint", {"step": 3}, None),
        ("hub", "step 7", {}, None),
    ],
)
def test_a_step_is_known_by_its_name_and_number(
    track: str, name: str, detail: dict[str, str | int | float], step: int | None
) -> None:
    assert Span(track=track, name=name, start_s=0.0, end_s=1.0, detail=detail).step == step


def test_overlap_without_a_step_is_not_a_number() -> None:
    assert math.isnan(sampling_overlap([Span(track="rollout 0", name="sample", start_s=0, end_s=1)]))
