"""What a person sees while a run goes on: a live picture on a terminal, plain lines elsewhere."""

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from headrace.clients.cli.display_state import (
    DisplayState,
    advance,
    count,
    duration,
    evaluation,
    figure,
    is_step,
    sparkline,
)
from headrace.engine.telemetry.events import LogLine, MetricsRow, RunEvent
from headrace.engine.telemetry.trace_events import track_order

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


_SPARK_STEPS = 20  # so many fit beside the other figures at 80 columns


class Display(Protocol):
    """Shows a run. `open` before the first event, `close` after the last one."""

    @property
    def state(self) -> DisplayState:
        """What is known of the run by now."""
        ...

    def open(self, initial: DisplayState) -> None: ...

    def locate(self, run_folder: Path) -> None:
        """The run folder is known now."""
        ...

    def show(self, event: RunEvent) -> None: ...

    def note(self, text: str) -> None:
        """A line of the command's own, not of the run."""
        ...

    def close(self) -> None:
        """Leave the terminal as a program that prints lines wants it. May be called twice."""
        ...


def choose_display(stream: TextIO, now: Callable[[], float] = time.time) -> Display:
    """A live display where `stream` is a terminal that can redraw and rich is installed, else plain lines."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return PlainDisplay(stream, now)
    try:
        from rich.console import Console
    except ImportError:
        return PlainDisplay(stream, now)
    return LiveDisplay(Console(file=stream), now)


class PlainDisplay:
    """One line a step, an evaluation or a phase; nothing is redrawn, so that a log file stays readable."""

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.time) -> None:
        """`now` gives Unix time."""
        self.state = DisplayState()
        self._stream = stream
        self._reader_is_gone = False
        self._now = now

    def open(self, initial: DisplayState) -> None:
        self.state = initial

    def locate(self, run_folder: Path) -> None:
        self.state = dataclasses.replace(self.state, run_folder=str(run_folder))
        self.note(f"run folder {run_folder}")

    def show(self, event: RunEvent) -> None:
        now_s = self._now()
        self.state = advance(self.state, event, now_s)
        line = plain_line(event, self.state, now_s)
        if line:
            self.note(line)

    def note(self, text: str) -> None:
        if self._reader_is_gone:
            return
        try:
            print(text, file=self._stream, flush=True)
        except BrokenPipeError:
            self._reader_is_gone = True  # nobody looks any more, which is no reason to end the run

    def close(self) -> None:
        """Every line has been flushed already."""


class LiveDisplay:
    """Redraws a panel four times a second, with a thread of its own; other output of the process appears above it."""

    def __init__(self, console: "Console", now: Callable[[], float] = time.time) -> None:
        """`now` gives Unix time."""
        from rich.live import Live

        self.state = DisplayState()
        self._now = now
        self._console = console
        self._live = Live(get_renderable=lambda: render(self.state, self._now()), console=console, refresh_per_second=4)

    def open(self, initial: DisplayState) -> None:
        self.state = initial
        self._live.start(refresh=True)

    def locate(self, run_folder: Path) -> None:
        self.state = dataclasses.replace(self.state, run_folder=str(run_folder))

    def show(self, event: RunEvent) -> None:
        self.state = advance(self.state, event, self._now())

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


def plain_line(event: RunEvent, state: DisplayState, now_s: float) -> str:
    """The line for `event` at `now_s` (Unix time), where `state` is already the one after it; empty if it has none."""
    if isinstance(event, LogLine):
        return event.text
    if not isinstance(event, MetricsRow):
        return ""
    lines: list[str] = []
    if is_step(event) and state.last is not None:
        last = state.last
        total = f"/{state.num_steps}" if state.num_steps else ""
        lines.append(
            f"step {last.step}{total} reward {figure(last.reward)} lag {figure(last.lag_mean, 1)} "
            f"tokens/s {count(last.tokens_per_s)} step_s {figure(last.step_s, 1)} eta {duration(state.eta_s(now_s))}"
        )
    done = evaluation(event)
    if done is not None:
        lines.append(f"eval after step {done.step}: {done.text()}")
    return "\n".join(lines)


def render(state: DisplayState, now_s: float) -> "RenderableType":
    """The panel for `state` at `now_s` (Unix time). Draws nothing itself."""
    from rich.console import Group
    from rich.constrain import Constrain
    from rich.panel import Panel
    from rich.text import Text

    parts: list[RenderableType] = [_progress(state, now_s), Text(), _figures(state)]
    if state.last_eval is not None:
        parts.append(_eval_text(state))
    if state.activities:
        parts += [Text(), _activities(state, now_s)]
    if state.log:
        parts += [Text(), *(Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in state.log)]
    if state.error:
        parts += [Text(), Text(state.error, style="bold red")]
    heads = [part for part in ("headrace", state.model, state.backend) if part]
    colour = "red" if state.ended == "failed" else "cyan"
    panel = Panel(
        Group(*parts),
        title=Text(" · ".join(heads), style=f"bold {colour}"),
        title_align="left",
        subtitle=Text(state.run_folder, style="dim") if state.run_folder else None,
        subtitle_align="left",
        border_style=colour,
        padding=(1, 2),
    )
    return Constrain(panel, 100)


def _progress(state: DisplayState, now_s: float) -> "Table":
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    eta_s = state.eta_s(now_s)
    right: str = state.ended
    if not right:
        right = "warming up" if eta_s is None else f"{duration(eta_s)} left"
    right += f" · {duration(now_s - state.started_s)} so far" if state.started_s else ""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True, justify="right")
    total = f"/{state.num_steps}" if state.num_steps else ""
    table.add_row(
        Text(f"step {state.step}{total}", style="bold"),
        ProgressBar(total=max(1, state.num_steps), completed=state.step, complete_style="cyan"),
        Text(right),
    )
    return table


def _figures(state: DisplayState) -> "Table":
    from rich.table import Table
    from rich.text import Text

    last = state.last
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    reward = Text(figure(last.reward if last else None), style="bold")
    if state.rewards:
        reward.append(f"  {sparkline(state.rewards[-_SPARK_STEPS:])}", style="green")
    lag = "-" if last is None else f"{figure(last.lag_mean, 1)} mean, {figure(last.lag_max, 0)} max"
    step_s = "-" if last is None or last.step_s is None else f"{last.step_s:.1f} s"
    groups = f"{count(state.groups_in_flight)} in flight, {count(state.groups_ready)} ready"
    overlap = "-" if last is None or last.overlap is None else f"{last.overlap:.0%} of step time"
    table.add_row("reward", reward, "staleness", lag)
    table.add_row("tokens/s", count(last.tokens_per_s if last else None), "groups", groups)
    table.add_row("step time", step_s, "sampling ran", overlap)
    return table


def _eval_text(state: DisplayState) -> "Text":
    from rich.text import Text

    last, first = state.last_eval, state.first_eval
    assert last is not None
    text = Text.assemble(("last eval  ", "dim"), f"after step {last.step}: {last.text()}")
    if first is not None and first.step != last.step and first.accuracy is not None:
        text.append(f"  (was {figure(first.accuracy)})", style="dim")
    return text


def _activities(state: DisplayState, now_s: float) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=60)
    table.add_column(no_wrap=True, justify="right", style="dim")
    many = {role for role, member in state.activities if member > 0}
    names = {key: f"{key[0]} {key[1]}" if key[0] in many else key[0] for key in state.activities}
    for key in sorted(names, key=lambda key: track_order(f"{key[0]} {key[1]}")):
        activity = state.activities[key]
        waits = activity.doing.startswith("wait")
        table.add_row(
            Text(names[key], style="yellow" if waits else "green"),
            Text(activity.doing, style="dim" if waits else ""),
            Text(duration(now_s - activity.since_s)),
        )
    return table
