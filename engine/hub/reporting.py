"""What a run tells people: metrics rows, samples, the timeline, log lines and events for those who watch.

A watcher that is slow or gone changes nothing in the run: its queue is bounded and the oldest events go first.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from headrace.engine.clock import Clock
from headrace.engine.errors import StorageError
from headrace.engine.hub.credit import Sample
from headrace.engine.telemetry.events import Activity, LogLine, MetricsRow, RunEvent, RunStatus
from headrace.engine.telemetry.metrics import MetricAccumulator, MetricsWriter
from headrace.engine.telemetry.run_folder import RunFolder
from headrace.engine.telemetry.samples import SampleRow, SampleWriter
from headrace.engine.telemetry.timeline import Timeline
from headrace.engine.transport.control import Span
from headrace.engine.types import FinishReason, RewardOutcome, Trajectory

log = logging.getLogger(__name__)

_WATCH_QUEUE = 1024


class Reporting:
    """The run folder's files and the watchers. Blocks for small appends only."""

    def __init__(self, folder: RunFolder, clock: Clock) -> None:
        self.folder = folder
        self.parts = MetricAccumulator()
        self.trouble: StorageError | None = None  # of the log, which is written where nobody could handle it
        self.timeline = Timeline(folder.spans_path)
        self._metrics = MetricsWriter(folder.metrics_path, clock)
        self._samples = SampleWriter(folder.samples_path, clock)
        self._clock = clock
        self._last_step_s = clock.monotonic()
        self._last_step_wall_s = clock.wall()
        self._watchers: list[asyncio.Queue[RunEvent]] = []

    # Watching

    def watch(self) -> asyncio.Queue[RunEvent]:
        """Events from now on, until `unwatch`."""
        queue: asyncio.Queue[RunEvent] = asyncio.Queue(_WATCH_QUEUE)
        self._watchers.append(queue)
        return queue

    def unwatch(self, queue: asyncio.Queue[RunEvent]) -> None:
        """Forget a watcher."""
        self._watchers.remove(queue)

    def say(self, text: str) -> None:
        """A line for people. Never raises: that log.txt cannot be written is kept in `trouble`."""
        log.info("%s", text)
        try:
            self.folder.log(text, self._clock.wall())
        except StorageError as error:
            self.trouble = error
        self.emit(LogLine(text=text))

    def activity(self, activity: Activity) -> None:
        """A role does something else from now on."""
        self.emit(activity)

    def status(self, status: RunStatus) -> None:
        """Where the run stands."""
        self.emit(status)

    def emit(self, event: RunEvent) -> None:
        """Hand an event to every watcher."""
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)

    # Figures

    def spans(self, spans: Sequence[Span]) -> None:
        """Work done, for the timeline."""
        for span in spans:
            self.timeline.add(span.track, span.name, span.start_s, span.end_s)

    def trained_on(self, step: int, samples: Sequence[Sample]) -> None:
        """The samples of a batch."""
        for sample in samples:
            trajectory, reward, advantage = sample.trajectory, sample.reward, sample.advantage
            lag = step - trajectory.oldest_version.version
            tokens = len(trajectory.response_token_ids)
            self.parts.add("critic/score/mean", sample.score)
            self.parts.add("critic/rewards/mean", reward)
            self.parts.add("critic/rewards/max", reward)
            self.parts.add("critic/rewards/min", reward)
            self.parts.add("critic/advantages/mean", advantage, tokens)
            self.parts.add("response_length/mean", tokens)
            self.parts.add("response_length/max", tokens)
            self.parts.add("response_length/clip_ratio", float(trajectory.finish_reason is FinishReason.LENGTH))
            self.parts.add("off_policy/mean", step - trajectory.mean_version)
            self.parts.add("off_policy/max", lag)
            self._samples.write(sample_row("train", step, trajectory, sample.score))

    def evaluated(
        self, step: int, name: str, samples: Sequence[tuple[Trajectory, RewardOutcome]], threshold: float
    ) -> None:
        """A whole evaluation; writes a row of its own. Each prompt counts once, whatever batch it was in."""
        for trajectory, outcome in samples:
            self._samples.write(sample_row("eval", step, trajectory, outcome.value))
        rewards = [outcome.value for _, outcome in samples]
        right = sum(reward >= threshold for reward in rewards) / len(rewards)
        values: dict[str, float | None] = {
            "eval/rewards/mean": sum(rewards) / len(rewards),
            "eval/accuracy": right,
            "eval/num_prompts": float(len(rewards)),
            f"eval/{name}/avg@1": right,
        }
        for key in sorted({key for _, outcome in samples for key in outcome.metrics}):
            found = [outcome.metrics[key] for _, outcome in samples if key in outcome.metrics]
            values[f"eval/{name}/{key}"] = sum(found) / len(found)
        self.emit(MetricsRow(step=step, values=self._metrics.write(step, values)))

    def finish_step(self, step: int, learner: Mapping[str, float], tokens: int) -> None:
        """Write the row of a step: the learner's own figures and what the hub has gathered since the last."""
        now_s, wall_s = self._clock.monotonic(), self._clock.wall()
        step_s = now_s - self._last_step_s
        self.parts.add_all(learner)
        self.parts.add("timing_s/step", step_s)
        if step_s > 0:
            self.parts.add("perf/throughput", tokens / step_s)
        for name, value in self.timeline.figures(self._last_step_wall_s, wall_s).items():
            self.parts.add(name, value)
        self._last_step_s, self._last_step_wall_s = now_s, wall_s
        self.emit(MetricsRow(step=step, values=self._metrics.write(step, self.parts.take())))

    def close(self) -> None:
        """Write the timeline and close the files.

        Raises:
            StorageError: The timeline cannot be written; the files are closed all the same.
        """
        try:
            self.timeline.write(self.folder.timeline_path)
        finally:
            self.timeline.close()
            self._metrics.close()
            self._samples.close()


def sample_row(kind: str, step: int, trajectory: Trajectory, reward: float) -> SampleRow:
    return SampleRow(
        step=step,
        kind="eval" if kind == "eval" else "train",
        record_id=trajectory.record_id,
        prompt=trajectory.prompt_text,
        response=trajectory.response_text,
        reward=reward,
        lag=None if kind == "eval" else step - trajectory.oldest_version.version,
        num_tokens=len(trajectory.response_token_ids),
        finish_reason=trajectory.finish_reason.name.lower(),
    )
