"""What a run leaves behind and shows while it goes: run folder, metrics, samples, timeline, events."""

from headrace.engine.telemetry.events import (
    Activity,
    Ended,
    LogLine,
    MetricsRow,
    RunEvent,
    RunEvents,
    RunResult,
    RunStatus,
)
from headrace.engine.telemetry.loop_lag import LoopLag
from headrace.engine.telemetry.metric_keys import METRIC_KEYS, MetricKey
from headrace.engine.telemetry.metrics import MetricAccumulator, MetricsWriter
from headrace.engine.telemetry.run_folder import RunFolder
from headrace.engine.telemetry.samples import SampleRow, SampleWriter
from headrace.engine.telemetry.timeline import Span, Timeline, load_spans, sampling_overlap

__all__ = [
    "METRIC_KEYS",
    "Activity",
    "Ended",
    "LogLine",
    "LoopLag",
    "MetricAccumulator",
    "MetricKey",
    "MetricsRow",
    "MetricsWriter",
    "RunEvent",
    "RunEvents",
    "RunFolder",
    "RunResult",
    "RunStatus",
    "SampleRow",
    "SampleWriter",
    "Span",
    "Timeline",
    "load_spans",
    "sampling_overlap",
]
