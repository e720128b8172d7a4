"""What the display of a run knows, as a value that events move on.

Pure: no clock, no terminal. The live display and the plain lines both draw from it.

Invariants:
    `advance` returns a new state and leaves the old one as it was, so that another thread may draw the old one.
    Memory is bounded, however long the run is.
"""

import dataclasses
import math
from collections.abc import Mapping

from headrace.engine.telemetry.events import Activity, Ended, LogLine, MetricsRow, RunEvent, RunStatus

KEPT_STEPS = 48  # rewards in the sparkline
KEPT_LINES = 5  # log lines
ETA_STEPS = 10  # steps that the remaining time is judged by

_BARS = "▁▂▃▄▅▆▇█"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation: after how many steps, share of right answers, mean reward, prompts; None where not known."""

    step: int
    accuracy: float | None
    reward: float | None
    num_prompts: int | None

    def text(self) -> str:
        """Such as "accuracy 0.31 reward 0.35 on 64 prompts"."""
        parts = [f"accuracy {figure(self.accuracy)}"] if self.accuracy is not None else []
        parts += [f"reward {figure(self.reward)}"] if self.reward is not None else []
        parts += [f"on {self.num_prompts} prompts"] if self.num_prompts is not None else []
        return " ".join(parts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """The figures of the last step that people look at; None where not known."""

    step: int
    reward: float | None
    lag_mean: float | None
    lag_max: float | None
    tokens_per_s: float | None
    step_s: float | None
    overlap: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DisplayState:
    """Everything that is drawn. Times are Unix seconds.

    Attributes:
        rewards: Of the last `KEPT_STEPS` steps, oldest first.
        row_times_s: When the last rows came, for the remaining time.
        activities: By role and member.
        log: The last lines.
    """

    model: str = ""
    backend: str = ""
    run_folder: str = ""
    started_s: float = 0.0
    step: int = 0
    num_steps: int = 0
    ended: Ended = ""
    error: str | None = None
    last: StepFigures | None = None
    rewards: tuple[float, ...] = ()
    row_times_s: tuple[float, ...] = ()
    groups_in_flight: int | None = None
    groups_ready: int | None = None
    activities: Mapping[tuple[str, int], Activity] = dataclasses.field(default_factory=dict[tuple[str, int], Activity])
    first_eval: Evaluation | None = None
    last_eval: Evaluation | None = None
    log: tuple[str, ...] = ()

    def eta_s(self, now_s: float) -> float | None:
        """Seconds from `now_s` to the end, judged by the last steps; None while that cannot be said."""
        remaining, times_s = self.num_steps - self.step, self.row_times_s
        if self.num_steps <= 0 or remaining < 0 or len(times_s) == 0:
            return None
        if len(times_s) >= 2:
            step_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
        elif self.last is not None and self.last.step_s is not None:
            step_s = self.last.step_s
        else:
            return None
        return max(0.0, remaining * step_s - (now_s - times_s[-1]))


def advance(state: DisplayState, event: RunEvent, now_s: float) -> DisplayState:
    """The state after `event`, which was seen at `now_s` (Unix time)."""
    match event:
        case MetricsRow():
            return _after_row(state, event, now_s)
        case Activity():
            activities = dict(state.activities)
            activities.pop((event.role, event.member), None)
            if event.doing:
                activities[event.role, event.member] = event
            return dataclasses.replace(state, activities=activities)
        case LogLine():
            return dataclasses.replace(state, log=(*state.log, event.text)[-KEPT_LINES:])
        case RunStatus():
            return _after_status(state, event)


def evaluation(row: MetricsRow) -> Evaluation | None:
    """The evaluation that a row tells of, if it does."""
    if not any(name.startswith("eval/") for name in row.values):
        return None
    num_prompts = _value(row, "eval/num_prompts")
    return Evaluation(
        step=row.step,
        accuracy=_value(row, "eval/accuracy"),
        reward=_value(row, "eval/rewards/mean"),
        num_prompts=None if num_prompts is None else round(num_prompts),
    )


def is_step(row: MetricsRow) -> bool:
    """Whether a row tells of a training step; one of an evaluation alone does not."""
    return any(not name.startswith("eval/") for name in row.values)


def step_figures(row: MetricsRow) -> StepFigures:
    """The figures of a training step."""
    return StepFigures(
        step=row.step,
        reward=_value(row, "critic/rewards/mean"),
        lag_mean=_value(row, "off_policy/mean"),
        lag_max=_value(row, "off_policy/max"),
        tokens_per_s=_value(row, "perf/throughput"),
        step_s=_value(row, "timing_s/step"),
        overlap=_value(row, "overlap/sampling"),
    )


def _after_row(state: DisplayState, row: MetricsRow, now_s: float) -> DisplayState:
    done = evaluation(row)
    if done is not None:
        state = dataclasses.replace(state, first_eval=state.first_eval or done, last_eval=done)
    if not is_step(row):
        return state
    figures = step_figures(row)
    rewards = state.rewards if figures.reward is None else (*state.rewards, figures.reward)
    in_flight, ready = _value(row, "off_policy/in_flight"), _value(row, "off_policy/in_queue")
    return dataclasses.replace(
        state,
        step=row.step,
        last=figures,
        rewards=rewards[-KEPT_STEPS:],
        row_times_s=(*state.row_times_s, now_s)[-ETA_STEPS - 1 :],
        groups_in_flight=state.groups_in_flight if in_flight is None else round(in_flight),
        groups_ready=state.groups_ready if ready is None else round(ready),
    )


def _after_status(state: DisplayState, status: RunStatus) -> DisplayState:
    return dataclasses.replace(
        state,
        step=max(state.step, status.step),
        num_steps=status.num_steps,
        ended=status.ended,
        error=status.error,
        model=status.model or state.model,
        backend=status.backend or state.backend,
        groups_in_flight=state.groups_in_flight if status.groups_in_flight is None else status.groups_in_flight,
        groups_ready=state.groups_ready if status.groups_ready is None else status.groups_ready,
        activities={} if status.ended else state.activities,
    )


def _value(row: MetricsRow, name: str) -> float | None:
    value = row.values.get(name)
    return value if value is not None and math.isfinite(value) else None


def figure(value: float | None, digits: int = 2) -> str:
    """A number with so many digits after the point, or "-"."""
    return "-" if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """A large number, short: 310, 12.4k, 3.1M; or "-"."""
    if value is None:
        return "-"
    for limit, unit in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e6 if unit == 'M' else 1e3):.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """Such as 7s, 6m10s, 2h05m, 3d04h; or "-"."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    minutes, s = divmod(whole, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02}h"
    if hours:
        return f"{hours}h{m:02}m"
    return f"{m}m{s:02}s" if minutes else f"{s}s"


def sparkline(values: tuple[float, ...]) -> str:
    """One bar a value, from the lowest to the highest of them; all the same height where they are all equal."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:
        return _BARS[3] * len(values)
    return "".join(_BARS[min(len(_BARS) - 1, int((value - low) / (high - low) * len(_BARS)))] for value in values)
