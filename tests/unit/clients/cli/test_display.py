import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from headrace.clients.cli.display import LiveDisplay, PlainDisplay, choose_display, render
from headrace.clients.cli.display_state import (
    KEPT_LINES,
    KEPT_STEPS,
    DisplayState,
    advance,
    count,
    duration,
    figure,
    sparkline,
)
from headrace.engine.telemetry.events import Activity, LogLine, MetricsRow, RunEvent, RunStatus

START = 1_790_000_000.0


def step_row(step: int, reward: float | None = 0.42, **more: float | None) -> MetricsRow:
    values = {
        "critic/rewards/mean": reward,
        "off_policy/mean": 0.8,
        "off_policy/max": 1.0,
        "off_policy/in_flight": 6.0,
        "off_policy/in_queue": 2.0,
        "perf/throughput": 310.4,
        "timing_s/step": 17.2,
        "overlap/sampling": 0.93,
    }
    return MetricsRow(step=step, values={**values, **more})


def eval_row(step: int, accuracy: float) -> MetricsRow:
    values = {"eval/accuracy": accuracy, "eval/rewards/mean": 0.35, "eval/num_prompts": 64.0}
    return MetricsRow(step=step, values={**values})


def after(*events: RunEvent, every_s: float = 10.0) -> DisplayState:
    state = DisplayState(started_s=START, run_folder="runs/demo-20260921-120000")
    for number, event in enumerate(events, start=1):
        state = advance(state, event, START + every_s * number)
    return state


def drawn(state: DisplayState, now_s: float, width: int = 100) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(render(state, now_s))
    return console.export_text()


def test_a_run_that_is_no_terminal_has_one_plain_line_a_step_phase_and_evaluation() -> None:
    stream = io.StringIO()
    times = iter([START, START + 1, START + 2, START + 3, START + 20.2])
    display = PlainDisplay(stream, lambda: next(times))
    display.open(DisplayState(num_steps=30))
    display.locate(Path("runs/demo"))
    display.show(LogLine(text="engine vllm ready in 24 s"))
    display.show(Activity(role="learner", member=0, doing="step 1", since_s=START))
    display.show(eval_row(0, 0.12))
    display.show(step_row(1, 0.1))
    display.show(step_row(2))
    display.note("stopping")
    display.close()
    assert stream.getvalue().splitlines() == [
        "run folder runs/demo",
        "engine vllm ready in 24 s",
        "eval after step 0: accuracy 0.12 reward 0.35 on 64 prompts",
        "step 1/30 reward 0.10 lag 0.8 tokens/s 310 step_s 17.2 eta 8m19s",
        "step 2/30 reward 0.42 lag 0.8 tokens/s 310 step_s 17.2 eta 8m02s",
        "stopping",
    ]


def test_a_figure_that_is_not_known_is_a_dash() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, lambda: START)
    display.show(MetricsRow(step=1, values={"critic/rewards/mean": None, "perf/throughput": math.nan}))
    assert stream.getvalue() == "step 1 reward - lag - tokens/s - step_s - eta -\n"


def test_a_reader_that_goes_away_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    display = PlainDisplay(Gone(), lambda: START)
    display.show(LogLine(text="one"))
    display.show(LogLine(text="two"))
    display.close()


def test_the_panel_says_what_the_run_does_and_how_far_it_is() -> None:
    state = after(
        RunStatus(step=0, num_steps=30, model="tiny-135m", backend="vllm"),
        LogLine(text="engine vllm ready in 24 s"),
        eval_row(0, 0.12),
        step_row(1, 0.1),
        step_row(2, 0.42),
        eval_row(2, 0.31),
        Activity(role="learner", member=0, doing="step 3", since_s=START + 58),
        Activity(role="rollout", member=1, doing="sampling 4 groups", since_s=START + 40),
        Activity(role="rollout", member=0, doing="waiting for weights", since_s=START + 69),
    )
    text = drawn(state, START + 70)
    for words in (
        "headrace · tiny-135m · vllm",
        "runs/demo-20260921-120000",
        "step 2/30",
        "4m20s left · 1m10s so far",
        "0.42  ▁█",
        "0.8 mean, 1 max",
        "6 in flight, 2 ready",
        "93% of step time",
        "after step 2: accuracy 0.31 reward 0.35 on 64 prompts  (was 0.12)",
        "engine vllm ready in 24 s",
    ):
        assert words in text, words
    lines = [line.strip("│ ").split("  ") for line in text.splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert [row for row in rows if row and row[0].startswith(("learner", "rollout"))] == [
        ["learner", "step 3", "12s"],
        ["rollout 0", "waiting for weights", "1s"],
        ["rollout 1", "sampling 4 groups", "30s"],
    ]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_panel_fits_any_width_and_takes_text_as_it_is(width: int) -> None:
    state = after(RunStatus(step=0, num_steps=3), LogLine(text="[bold]not markup[/bold] " + "x" * 300), step_row(1))
    lines = drawn(state, START, width).splitlines()
    assert max(len(line) for line in lines) <= min(width, 100)
    assert any("[bold]not markup[/bold]" in line for line in lines)


def test_a_failed_run_shows_its_error_and_nobody_at_work() -> None:
    state = after(
        Activity(role="learner", member=0, doing="step 3", since_s=START),
        RunStatus(step=2, num_steps=30, ended="failed", error="no reward server answers"),
    )
    text = drawn(state, START + 30)
    assert "no reward server answers" in text and "failed" in text
    assert "learner" not in text


def test_an_empty_state_can_be_drawn() -> None:
    assert "warming up" in drawn(DisplayState(num_steps=5, started_s=START), START + 3)


def test_the_remaining_time_follows_the_last_steps_and_counts_down_between_them() -> None:
    state = after(RunStatus(step=0, num_steps=100))
    assert state.eta_s(START) is None
    state = advance(state, step_row(1), START + 100)
    assert state.eta_s(START + 100) == pytest.approx(99 * 17.2)
    for step in range(2, 96):
        state = advance(state, step_row(step), START + (30 * step if step < 80 else 2400 + 4 * (step - 80)))
    assert state.eta_s(START + 2460) == pytest.approx(5 * 4)
    assert state.eta_s(START + 2462) == pytest.approx(18)
    assert state.eta_s(START + 2999) == 0.0


def test_memory_of_the_display_is_bounded_and_old_states_stay_as_they_were() -> None:
    first = after(step_row(1, 0.5))
    state = first
    for step in range(2, 1000):
        state = advance(state, step_row(step, float(step)), START + step)
        state = advance(state, LogLine(text=f"line {step}"), START + step)
    assert len(state.rewards) == KEPT_STEPS and state.rewards[-1] == 999.0
    assert len(state.row_times_s) == 11
    assert state.log == tuple(f"line {i}" for i in range(1000 - KEPT_LINES, 1000))
    assert first.rewards == (0.5,) and first.log == ()


def test_a_member_that_leaves_is_no_longer_shown() -> None:
    state = after(Activity(role="rollout", member=1, doing="sampling", since_s=START))
    assert list(state.activities) == [("rollout", 1)]
    assert advance(state, Activity(role="rollout", member=1, doing="", since_s=START), START).activities == {}


def test_an_evaluation_alone_is_no_step() -> None:
    state = after(step_row(4), eval_row(4, 0.3), eval_row(8, 0.5))
    assert state.step == 4 and len(state.row_times_s) == 1
    assert state.first_eval is not None and state.first_eval.step == 4
    assert state.last_eval is not None and state.last_eval.accuracy == 0.5


def test_numbers_are_written_for_people() -> None:
    assert [duration(s) for s in (None, 0.4, 7, 370, 7500, 273_600)] == ["-", "0s", "7s", "6m10s", "2h05m", "3d04h"]
    assert [count(n) for n in (None, 9.6, 310, 9999, 12_400, 3_100_000)] == ["-", "10", "310", "9999", "12.4k", "3.1M"]
    assert (figure(None), figure(0.456), figure(3.04, 1)) == ("-", "0.46", "3.0")
    assert (sparkline(()), sparkline((1.0, 1.0)), sparkline((0.0, 0.5, 1.0))) == ("", "▄▄", "▁▅█")


def test_plain_lines_are_chosen_where_nothing_can_be_redrawn() -> None:
    assert isinstance(choose_display(io.StringIO()), PlainDisplay)


def test_the_live_display_leaves_the_last_picture_and_its_notes_behind() -> None:
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, width=100, force_terminal=True), lambda: START + 5)
    display.open(DisplayState(num_steps=3, started_s=START))
    display.locate(Path("runs/demo"))
    display.show(step_row(1))
    display.note("stopping [now]")
    display.close()
    display.close()
    assert "stopping [now]" in out.getvalue()
    assert "step 1/3" in out.getvalue()
    assert "runs/demo" in out.getvalue()
