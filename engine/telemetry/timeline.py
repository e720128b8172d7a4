"""Who worked when: spans of all roles, kept on disk while the run goes on, and the figures made from them.

A *track* is one member of a role: "learner", "rollout 0", "reward", "weights", "hub"; its first word is the role. All
times are seconds on one clock; Unix time by convention, so that spans of several processes and of a resumed run fit
together.

A span is work, unless its name begins with "wait": such a span is drawn, but its time is idle time. The spans of the
learner's optimizer steps are called "step 7", or "step" with the number under "step" in their detail.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from headrace.engine.errors import StorageError
from headrace.engine.telemetry.intervals import Interval, busy_ratio, clipped, overlap_fraction
from headrace.engine.telemetry.line_file import LineFile, storage_error, write_whole
from headrace.engine.telemetry.trace_events import trace_json

_STEP = "step"
SPANS_FILE = "timeline.spans.jsonl"  # beside timeline.json, one span a line
_ROLES_WITH_FIGURES = ("learner", "rollout", "reward")

Detail = Mapping[str, str | int | float]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of time on one track; see the module for what names mean."""

    track: str
    name: str
    start_s: float
    end_s: float
    detail: dict[str, str | int | float] = {}

    @property
    def role(self) -> str:
        """The first word of the track."""
        return self.track.split(" ", 1)[0]

    @property
    def is_work(self) -> bool:
        """Whether its time counts as busy."""
        return not self.name.startswith("wait")

    @property
    def step(self) -> int | None:
        """Which optimizer step of the learner this span is; -1 for one without a number, None for any other span."""
        word, _, number = self.name.partition(" ")
        if self.role != "learner" or word != _STEP:
            return None
        given = self.detail.get("step", number)
        return int(given) if isinstance(given, int | float) or given.isdecimal() else -1


class Timeline:
    """Records spans. Not shared between threads.

    Memory is bounded: the newest `num_recent` spans are held for the figures, the rest lies in the spill file.
    Recording never fails the run: spans that the disk does not take are dropped and counted in `num_dropped`.
    """

    def __init__(self, spill_path: Path, *, num_recent: int = 4096, spill_every: int = 64) -> None:
        """Append to `spill_path`; spans of an earlier run in it stay part of the timeline.

        Raises:
            StorageError: The spill file cannot be opened.
        """
        self.num_dropped = 0
        self._file = LineFile(spill_path)
        self._spill_every = spill_every
        self._pending: list[Span] = []
        self._recent: deque[Span] = deque(maxlen=num_recent)
        self._open: dict[int, Span] = {}
        self._tracks: dict[str, None] = {}
        self._next_token = 0

    def add(self, track: str, name: str, start_s: float, end_s: float, detail: Detail | None = None) -> None:
        """Record a span that is over. Writes to disk every `spill_every` spans."""
        self._record(Span(track=track, name=name, start_s=start_s, end_s=end_s, detail=dict(detail or {})))

    def begin(self, track: str, name: str, start_s: float, detail: Detail | None = None) -> int:
        """Record that a span has begun; it counts in the figures from now on. Returns the token for `end`."""
        self._next_token += 1
        self._tracks.setdefault(track)
        self._open[self._next_token] = Span(
            track=track, name=name, start_s=start_s, end_s=math.inf, detail=dict(detail or {})
        )
        return self._next_token

    def end(self, token: int, end_s: float, detail: Detail | None = None) -> None:
        """Record the end of a span that `begin` gave `token` for; `detail` is added to that of the beginning.

        A token that has ended already is ignored, so that clean-up code may end it once more.
        """
        span = self._open.pop(token, None)
        if span is not None:
            self._record(msgspec.structs.replace(span, end_s=end_s, detail={**span.detail, **(detail or {})}))

    def figures(self, start_s: float, end_s: float) -> dict[str, float]:
        """`idle_ratio/{learner,rollout,reward}` and `overlap/sampling` of the window, from spans held in memory.

        A role with several tracks has the mean of theirs; a role that never had a span is absent. The overlap is the
        fraction of the learner's step time in the window during which at least one rollout track worked; NaN where
        there was no step.
        """
        spans = [*self._recent, *self._open.values()]
        figures: dict[str, float] = {}
        for role in _ROLES_WITH_FIGURES:
            ratios = [
                1.0 - busy_ratio(_work(span for span in spans if span.track == track), start_s, end_s)
                for track in self._tracks
                if track.split(" ", 1)[0] == role
            ]
            if ratios:
                figures[f"idle_ratio/{role}"] = statistics.fmean(ratios)
        figures["overlap/sampling"] = sampling_overlap(spans, start_s, end_s)
        return figures

    def write(self, path: Path) -> None:
        """Write all spans as a Chrome trace, which Perfetto opens. Reads the spill file into memory; blocks meanwhile.

        Spans that are still open are left out.

        Raises:
            StorageError: The disk is full or not writable; an earlier file at `path` is untouched.
        """
        self.flush()
        spans = load_spans(self._file.path)
        write_whole(path, trace_json([*spans, *self._pending]))

    def flush(self) -> None:
        """Hand what is pending to the disk; if it does not take it, the oldest spans beyond a bound are dropped."""
        if not self._pending:
            return
        try:
            self._file.append(b"\n".join(msgspec.json.encode(span) for span in self._pending))
        except StorageError:
            # The timeline is an extra; the writer of the metrics reports a full disk to the run.
            excess = max(0, len(self._pending) - 16 * self._spill_every)
            self.num_dropped += excess
            del self._pending[:excess]
            return
        self._pending.clear()

    def close(self) -> None:
        """Flush and close the spill file. May be called twice."""
        self.flush()
        self._file.close()

    def _record(self, span: Span) -> None:
        self._tracks.setdefault(span.track)
        self._recent.append(span)
        self._pending.append(span)
        if len(self._pending) >= self._spill_every:
            self.flush()


def load_spans(path: Path) -> list[Span]:
    """All spans of a spill file, in the order they were recorded. A missing file has none; a torn last line is skipped.

    Raises:
        StorageError: The file cannot be read, or a whole line of it is not a span.
    """
    spans: list[Span] = []
    decoder = msgspec.json.Decoder(Span)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    spans.append(decoder.decode(line))
                except msgspec.MsgspecError as error:
                    raise StorageError(f"line {number} of {path} is not a span ({error}): remove the line") from error
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(path, error) from error
    return spans


def sampling_overlap(spans: Iterable[Span], start_s: float = -math.inf, end_s: float = math.inf) -> float:
    """The fraction of the learner's step time in the window during which sampling ran, 0 to 1; NaN without a step."""
    held = list(spans)
    steps = [(span.start_s, span.end_s) for span in held if span.step is not None]
    sampling = _work(span for span in held if span.role == "rollout")
    return overlap_fraction(clipped(steps, start_s, end_s), sampling)


def _work(spans: Iterable[Span]) -> list[Interval]:
    return [(span.start_s, span.end_s) for span in spans if span.is_work]
