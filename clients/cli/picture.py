# pyright: basic
# (matplotlib leaves the types of many arguments open)
"""The picture of a run: who worked when, and how much of the learner's time was overlapped with sampling."""

import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.engine.errors import InputError
from headrace.engine.telemetry.intervals import Interval, clipped, merged
from headrace.engine.telemetry.line_file import write_whole
from headrace.engine.telemetry.timeline import Span, sampling_overlap
from headrace.engine.telemetry.trace_events import track_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW_STEPS = 8
_MAX_LANES = 8
_PX_AN_INCH = 96  # of browsers; matplotlib's SVG is in points, 72 an inch
_WIDTH_PX = 900
_LANE_PX = 42
_TOP_PX, _BOTTOM_PX = 82, 46  # title, axis
_BAR = 0.62  # of a lane's height

_INK, _FAINT, _GRID = "#1f2933", "#616e7c", "#e4e7eb"
_COLOURS = {"learner": "#2f6fb2", "rollout": "#e08e2b", "reward": "#3a9d6e", "weights": "#8c5ab5", "hub": "#7b8794"}
_STEP_SHADES = ("#2f6fb2", "#5b93cc")
_BAND = "#eaf2fa"


def draw_overlap(
    spans: Iterable[Span], path: Path, first_step: int | None = None, last_step: int | None = None
) -> float:
    """Draw some steps of a run as an SVG: one lane a track, a bar where it worked, the steps' numbers, the overlap.

    Blocks for about a second, most of it the import of matplotlib, none of whose global settings are touched. The file
    stays below 150 KB, because bars closer than three pixels become one.

    Args:
        spans: Of the whole run, in any order.
        path: The SVG to write.
        first_step, last_step: Which steps to show; without them `WINDOW_STEPS` from the middle of the run.

    Returns:
        The fraction of the shown steps' time during which sampling ran, 0 to 1.

    Raises:
        InputError: There is no learner step among those asked for.
        ImportError: matplotlib is not installed.
        StorageError: The disk is full or not writable.
    """
    held = list(spans)
    steps = _choose_steps(held, first_step, last_step)
    start_s, end_s = _window(held, steps)
    shown = [span for span in held if span.end_s > start_s and span.start_s < end_s]
    fraction = sampling_overlap(shown, steps[0].start_s, steps[-1].end_s)
    lanes = _lanes(shown)
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    lanes_px = _LANE_PX * len(lanes)
    height_px = _TOP_PX + lanes_px + _BOTTOM_PX
    figure = Figure(figsize=(_WIDTH_PX / _PX_AN_INCH, height_px / _PX_AN_INCH), facecolor="white")
    axes = figure.add_axes((96 / _WIDTH_PX, _BOTTOM_PX / height_px, 1 - 120 / _WIDTH_PX, lanes_px / height_px))
    bands = [(step.start_s - start_s, step.end_s - start_s) for step in steps]
    _rectangles(axes, bands, -0.55, len(lanes) - 0.45, facecolor=_BAND, zorder=0)
    for place, (name, spans_of_lane) in enumerate(lanes):
        _draw_lane(axes, place, name, spans_of_lane, start_s, end_s)
    _number_steps(axes, steps, start_s, end_s)
    _dress(axes, [name for name, _ in lanes], end_s - start_s)
    figure.text(24 / _WIDTH_PX, 1 - 30 / height_px, _title(fraction), fontsize=_pt(20), fontweight="bold", color=_INK)
    figure.text(24 / _WIDTH_PX, 1 - 52 / height_px, _subtitle(steps), fontsize=_pt(14), color=_FAINT)
    drawn = io.BytesIO()
    FigureCanvasSVG(figure).print_figure(drawn, format="svg", metadata={"Date": None})
    write_whole(path, drawn.getvalue())
    return fraction


def _choose_steps(spans: Sequence[Span], first_step: int | None, last_step: int | None) -> list[Span]:
    """The learner's step spans to show, in order of time. Of a step that ran twice (resume), the later one."""
    by_number = {span.step: span for span in spans if span.step is not None}
    if not by_number:
        raise InputError("the timeline has no learner step to draw: a run must finish at least one step")
    numbers = sorted(by_number)
    if first_step is None and last_step is None:
        begin = max(0, (len(numbers) - WINDOW_STEPS + 1) // 2)
        numbers = numbers[begin : begin + WINDOW_STEPS]
    low = numbers[0] if first_step is None else first_step
    high = numbers[-1] if last_step is None else last_step
    chosen = [by_number[number] for number in numbers if low <= number <= high]
    if not chosen:
        raise InputError(f"no step from {low} to {high} is in the timeline: it has {numbers[0]} to {numbers[-1]}")
    return sorted(chosen, key=lambda span: span.start_s)


def _window(spans: Sequence[Span], steps: Sequence[Span]) -> Interval:
    """From the end of the step before the first shown one, if it is near, to a little after the last one."""
    start_s, end_s = steps[0].start_s, steps[-1].end_s
    margin = 0.02 * (end_s - start_s)
    earlier = [span.end_s for span in spans if span.step is not None and span.end_s <= start_s]
    before_s = max(earlier, default=start_s - margin)
    typical = (end_s - start_s) / len(steps)
    return max(before_s, start_s - typical) - margin, end_s + margin


def _lanes(spans: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """One lane a track; one a role where tracks would be too many."""
    tracks = sorted({span.track for span in spans}, key=track_order)
    if len(tracks) <= _MAX_LANES:
        return [(track, [span for span in spans if span.track == track]) for track in tracks]
    roles = sorted({span.role for span in spans}, key=track_order)[:_MAX_LANES]
    return [(role, [span for span in spans if span.role == role]) for role in roles]


def _draw_lane(axes: "Axes", place: int, name: str, spans: Sequence[Span], start_s: float, end_s: float) -> None:
    colour = _COLOURS.get(name.split(" ", 1)[0], _COLOURS["hub"])
    gap_s = (end_s - start_s) * 3 / _WIDTH_PX
    waits = [(span.start_s, span.end_s) for span in spans if not span.is_work]
    work = [span for span in spans if span.is_work]
    if name == "learner":
        work = [span for span in work if span.step is None]
        for parity, shade in enumerate(_STEP_SHADES):
            steps = [(s.start_s, s.end_s) for s in spans if s.step is not None and s.step % 2 == parity]
            _bars(axes, place, steps, start_s, end_s, _BAR, facecolor=shade, zorder=4)
    _bars(axes, place, waits, start_s, end_s, 0.08, facecolor=colour, alpha=0.45, zorder=2)
    closed = _closed([(span.start_s, span.end_s) for span in work], gap_s)
    _bars(axes, place, closed, start_s, end_s, _BAR, facecolor=colour, zorder=3)


def _bars(
    axes: "Axes", place: int, bars: Iterable[Interval], start_s: float, end_s: float, height: float, **style: Any
) -> None:
    least_s = (end_s - start_s) / _WIDTH_PX  # a bar that is there can be seen
    shown = [(a - start_s, max(b, a + least_s) - start_s) for a, b in clipped(bars, start_s, end_s)]
    _rectangles(axes, shown, place - height / 2, place + height / 2, **style)


def _rectangles(axes: "Axes", widths: Sequence[Interval], top: float, bottom: float, **style: Any) -> None:
    """Rectangles of one colour as a single shape, which takes a quarter of the bytes that single ones would."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    if widths:
        corners = [[(a, top), (b, top), (b, bottom), (a, bottom), (a, top)] for a, b in widths]
        outlines = [Outline(corner, closed=True) for corner in corners]
        axes.add_patch(PathPatch(Outline.make_compound_path(*outlines), linewidth=0, **style))


def _closed(intervals: Iterable[Interval], gap_s: float) -> list[Interval]:
    """Merged, with gaps too narrow to be seen closed."""
    return [(start, end - gap_s) for start, end in merged((start, end + gap_s) for start, end in intervals)]


def _number_steps(axes: "Axes", steps: Sequence[Span], start_s: float, end_s: float) -> None:
    """The step's number above its band; on long windows only some are labelled."""
    every = math.ceil(len(steps) / 16)
    for step in steps[::every]:
        middle_s = (step.start_s + step.end_s) / 2 - start_s
        label = f"step {step.step}" if len(steps) <= 10 else f"{step.step}"
        axes.text(middle_s, -0.62, label, ha="center", va="bottom", fontsize=_pt(12.5), color=_FAINT)


def _dress(axes: "Axes", names: Sequence[str], length_s: float) -> None:
    axes.set_xlim(0, length_s)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_yticks(range(len(names)), names, fontsize=_pt(15), color=_INK)
    axes.tick_params(axis="y", length=0, pad=8)
    axes.tick_params(axis="x", length=0, labelsize=_pt(12.5), labelcolor=_FAINT, pad=4)
    axes.grid(axis="x", color=_GRID, linewidth=0.6, zorder=1)
    axes.set_axisbelow(True)
    axes.set_xlabel("seconds", fontsize=_pt(12.5), color=_FAINT, labelpad=2)
    for side in axes.spines.values():
        side.set_visible(False)


def _pt(px: float) -> float:
    return px * 72 / _PX_AN_INCH


def _title(fraction: float) -> str:
    return f"Sampling ran during {fraction:.0%} of the learner's step time"


def _subtitle(steps: Sequence[Span]) -> str:
    numbers = sorted(span.step for span in steps if span.step is not None)
    which = f"Step {numbers[0]}" if len(numbers) == 1 else f"Steps {numbers[0]} to {numbers[-1]}"
    return f"{which}. A bar is work; a thin line is waiting; the bands are the learner's optimizer steps."
