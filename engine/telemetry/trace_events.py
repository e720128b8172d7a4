"""Spans as a Chrome trace-event file (the JSON object format), which Perfetto and chrome://tracing open.

One thread a track. The format wants the events of one thread to nest; spans of a track that cross each other (groups
that are sampled side by side) go to further threads of the same name.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

_ORDER = ("learner", "rollout", "reward", "weights", "hub")
_PID = 1


class TraceSpan(Protocol):
    """What is needed of a span; times in seconds."""

    @property
    def track(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def detail(self) -> Mapping[str, str | int | float]: ...


class _Event(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    ph: str
    pid: int
    tid: int
    ts: float = -1.0  # microseconds
    dur: float = -1.0  # microseconds
    cat: str = ""
    args: dict[str, str | int | float] = {}


def track_order(track: str) -> tuple[int, str, int]:
    """Sort key of tracks: learner first, then rollout workers by number, rewards, weights, the hub, others by name."""
    role, _, member = track.partition(" ")
    place = _ORDER.index(role) if role in _ORDER else len(_ORDER)
    return place, role, int(member) if member.isdecimal() else 0


def trace_json(spans: Iterable[TraceSpan]) -> bytes:
    """The whole file. Time 0 of the trace is the earliest start; `otherData.start_s` says when that was."""
    tracks: dict[str, list[TraceSpan]] = {}
    for span in spans:
        tracks.setdefault(span.track, []).append(span)
    zero_s = min((span.start_s for held in tracks.values() for span in held), default=0.0)
    events = [_Event(name="process_name", ph="M", pid=_PID, tid=0, args={"name": "headrace"})]
    tid = 0
    for track in sorted(tracks, key=track_order):
        for number, lane in enumerate(_lanes(tracks[track]), start=1):
            tid += 1
            label = track if number == 1 else f"{track} ({number})"
            events.append(_Event(name="thread_name", ph="M", pid=_PID, tid=tid, args={"name": label}))
            events.append(_Event(name="thread_sort_index", ph="M", pid=_PID, tid=tid, args={"sort_index": tid}))
            events.extend(_complete(span, tid, zero_s) for span in lane)
    return msgspec.json.encode(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start_s": round(zero_s, 6)}}
    )


def _complete(span: TraceSpan, tid: int, zero_s: float) -> _Event:
    return _Event(
        name=span.name,
        ph="X",
        pid=_PID,
        tid=tid,
        ts=round((span.start_s - zero_s) * 1e6, 1),
        dur=round(max(0.0, span.end_s - span.start_s) * 1e6, 1),
        cat=span.track.split(" ", 1)[0],
        args=dict(span.detail),
    )


def _lanes(spans: list[TraceSpan]) -> list[list[TraceSpan]]:
    """Spread spans over as few threads as a first fit needs so that within each they nest or follow each other."""
    lanes: list[list[TraceSpan]] = []
    ends: list[list[float]] = []  # of each lane: ends of the spans that are open, outermost first
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        place = next((number for number, open_ends in enumerate(ends) if _fits(span, open_ends)), len(lanes))
        if place == len(lanes):
            lanes.append([])
            ends.append([])
        lanes[place].append(span)
        ends[place].append(span.end_s)
    return lanes


def _fits(span: TraceSpan, open_ends: list[float]) -> bool:
    """Whether the span lies in the innermost open one, once those that ended before it are taken off."""
    while open_ends and open_ends[-1] <= span.start_s:
        open_ends.pop()
    return not open_ends or span.end_s <= open_ends[-1]
