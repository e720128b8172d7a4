import msgspec

from headrace.engine.telemetry import Activity, LogLine, MetricsRow, RunEvent, RunStatus


def test_events_survive_a_process_border() -> None:
    events: list[RunEvent] = [
        MetricsRow(step=1, values={"critic/rewards/mean": 0.5, "perf/mfu": None}),
        Activity(role="rollout", member=0, doing="sampling 4 groups", since_s=10.0),
        LogLine(text="engine vllm ready in 24 s"),
        RunStatus(step=1, num_steps=3, ended="failed", error="no reward server"),
    ]
    assert msgspec.json.decode(msgspec.json.encode(events), type=list[RunEvent]) == events
