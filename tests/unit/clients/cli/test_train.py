import argparse
import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from headrace.clients.cli.train import add_arguments, run
from headrace.engine.config import Config
from headrace.engine.errors import ConfigError, RunError, UsageError
from headrace.engine.telemetry import LogLine, MetricsRow, RunEvent, RunResult, RunStatus, Timeline

CONFIG = """
[run]
steps = 2
[model]
path = "models/tiny"
[data]
path = "prompts.jsonl"
[reward]
function = "rewards:score"
"""


class FakeEngine:
    """Does what the engine's interface says, from a script: events, then the end or a wait for `stop`."""

    def __init__(self, folder: Path, script: Sequence[RunEvent | int], *, finishes: bool = True) -> None:
        self.run_folder = folder
        self.calls: list[str] = []
        self.config: Config | None = None
        self.resume: Path | None = None
        self.start_error: Exception | None = None
        self.starts = True
        self.slow_to_stop = False
        self._script = script
        self._finishes = finishes
        self._events: asyncio.Queue[RunEvent | None] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._stopped = False

    def __call__(self, config: Config, *, resume: Path | None = None) -> "FakeEngine":
        self.config, self.resume = config, resume
        return self

    async def __aenter__(self) -> "FakeEngine":
        self.calls.append("enter")
        self._events.put_nowait(LogLine(text="loading the model..."))
        if self.start_error is not None:
            self._events.put_nowait(None)
            raise self.start_error
        if not self.starts:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.calls.append("exit")

    async def events(self) -> AsyncIterator[RunEvent]:
        while (event := await self._events.get()) is not None:
            yield event

    async def wait(self) -> RunResult:
        for item in self._script:
            if isinstance(item, int):
                os.kill(os.getpid(), item)
            else:
                self._events.put_nowait(item)
        if not self._finishes:
            await self._ended.wait()
        ended = "stopped" if self._stopped else "finished"
        result = RunResult(steps=2, ended=ended)
        for item in self._script:
            if isinstance(item, RunStatus) and item.ended == "failed":
                result = RunResult(steps=2, ended="failed", error=item.error)
        if self._finishes or self._stopped:
            self._events.put_nowait(RunStatus(step=1 if self._stopped else 2, num_steps=2, ended=result.ended))
        self._events.put_nowait(None)
        return result

    async def stop(self, grace_s: float) -> None:
        self.calls.append(f"stop {grace_s:g}")
        self._stopped = True
        if self.slow_to_stop and grace_s > 0:
            os.kill(os.getpid(), signal.SIGINT)  # the user gets impatient
            await self._ended.wait()
        self._ended.set()


def row(step: int) -> MetricsRow:
    return MetricsRow(step=step, values={"critic/rewards/mean": 0.25 * step, "timing_s/step": 3.0})


def evaluated(step: int, accuracy: float) -> MetricsRow:
    return MetricsRow(step=step, values={"eval/accuracy": accuracy, "eval/rewards/mean": accuracy})


def record_spans(folder: Path) -> None:
    timeline = Timeline(folder / "timeline.spans.jsonl")
    timeline.add("rollout 0", "sample", 0.0, 6.0)
    timeline.add("learner", "step", 2.0, 10.0, {"step": 1})
    timeline.close()


def train(tmp_path: Path, engine: FakeEngine, *argv: str, overrides: Sequence[str] = ()) -> tuple[int, list[str]]:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(argv or [str(config)])
    args.overrides = list(overrides)
    out = io.StringIO()
    code = run(args, engine, out)
    return code, out.getvalue().splitlines()


def test_a_run_that_finishes_shows_its_steps_draws_the_overlap_and_ends_with_0(tmp_path: Path) -> None:
    record_spans(tmp_path)
    engine = FakeEngine(tmp_path, [evaluated(0, 0.12), row(1), row(2), evaluated(2, 0.55)])
    code, lines = train(tmp_path, engine)
    assert code == 0
    assert lines == [
        f"run folder {tmp_path}",
        "loading the model...",
        "eval after step 0: accuracy 0.12 reward 0.12",
        *lines[3:5],
        "eval after step 2: accuracy 0.55 reward 0.55",
        "eval       accuracy 0.12 -> 0.55, reward 0.12 -> 0.55 (step 0 -> 2)",
        f"overlap    {tmp_path}/overlap.svg (sampling ran during 50% of the step time shown)",
        f"run folder {tmp_path}",
    ]
    steps = [line.partition(" lag")[0] for line in lines[3:5]]
    assert steps == ["step 1/2 reward 0.25", "step 2/2 reward 0.50"]
    assert (tmp_path / "overlap.svg").is_file()
    assert engine.calls == ["enter", "exit"]


def test_a_run_without_a_timeline_says_why_there_is_no_picture(tmp_path: Path) -> None:
    code, lines = train(tmp_path, FakeEngine(tmp_path, [row(1)]))
    assert code == 0
    assert "overlap    overlap.svg was not drawn: the timeline has no learner step" in "\n".join(lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_term_signal_stops_in_an_orderly_way_and_says_so(tmp_path: Path, number: signal.Signals) -> None:
    engine = FakeEngine(tmp_path, [row(1), int(number)], finishes=False)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    before = signal.getsignal(number)
    code, lines = train(tmp_path, engine, overrides=["--timeouts.stop_s=7"])
    assert code == 130
    assert engine.calls == ["enter", "stop 7", "exit"]
    assert any(line.startswith(f"{number.name}: stopping; running work has 7 s to end") for line in lines)
    assert f"to go on   headrace train --resume {tmp_path}" in lines
    assert signal.getsignal(number) == before


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, [row(1), int(signal.SIGTERM)], finishes=False)
    engine.slow_to_stop = True
    code, lines = train(tmp_path, engine)
    assert code == 130
    assert engine.calls == ["enter", "stop 10", "stop 0", "exit"]
    assert "SIGINT: stopping at once" in lines


def test_a_signal_while_the_engine_starts_ends_the_start(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, [])
    engine.starts = False
    code, lines = train(tmp_path, engine)
    assert code == 130
    assert engine.calls == ["enter"]
    assert lines == ["loading the model...", "SIGTERM: stopping before the run has started"]


def test_a_failed_run_ends_with_1_and_names_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = RunStatus(step=1, num_steps=2, ended="failed", error="no reward server answers")
    code, lines = train(tmp_path, FakeEngine(tmp_path, [row(1), failed]))
    assert code == 1
    assert capsys.readouterr().err == "error: no reward server answers\n"
    assert lines[-1] == f"run folder {tmp_path}"


def test_an_engine_that_cannot_start_raises_its_error(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, [])
    engine.start_error = RunError("the inference engine ended while loading")
    with pytest.raises(RunError, match="ended while loading"):
        train(tmp_path, engine)


def test_resuming_takes_the_runs_own_configuration_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    engine = FakeEngine(tmp_path, [])
    code, _ = train(tmp_path, engine, "--resume", str(tmp_path), overrides=["--run.steps=5"])
    assert code == 0
    assert engine.resume == tmp_path
    assert engine.config is not None and engine.config.run.steps == 5


def test_a_configuration_that_cannot_be_used_starts_nothing(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, [])
    with pytest.raises(ConfigError, match="steps"):
        train(tmp_path, engine, overrides=["--run.stepz=5"])
    with pytest.raises(UsageError, match="needs a configuration"):
        train(tmp_path, engine, "--reward-server", "rewards:score")
    assert engine.calls == []
