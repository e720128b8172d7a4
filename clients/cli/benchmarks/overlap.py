"""How well sampling overlaps with training: the real engine, buffer and staleness window, with timed stand-ins.

Hub, buffer, reward pool, rollout worker, learner loop and weight publication are those of any run, over gRPC, the hub
in its own process. Only the model is missing: sampling and training keep time by sleeping.

The load (`overlap_load.Load`): 16 groups of 8 samples a step. Lengths are lognormal with sigma 1, cut at 12 times the
median (0.6 % of the responses). A sample gets its tokens at a constant speed, so a group holds its slot for as long as
its longest sample takes. *Slots* are groups in flight (`schedule.max_inflight`): 20, a quarter of the window of
max_staleness = 4 (80 groups). They are the hardware, so every setting has the same 20; at max_staleness = 0 the
window itself is 16 groups, and all of a batch run at once.

Equal busy time: with all slots busy, the groups of a step take as long to sample as the step takes to train (about
0.7 s). The default `stale_policy = "wait"` holds, so the learner waits for a group that would expire.

Figures of each setting, over the measured steps, from the commit of the last warm-up step to that of the last measured
step; the run goes on behind them, so that the window stays full. The fill of the pipeline falls into the warm-up:

    efficiency              ideal / measured; ideal = steps * step time, both sides busy all the time. What the learner
                            waits, and each call, copy and decoding that is not hidden, counts against us.
    speedup_over_on_policy  measured at max_staleness = 0 / measured here: the same groups on the same slots. There, a
                            step costs the slowest sample of its batch and then the training.
    wasted_tokens           of all tokens generated in the whole run, warm-up included, the fraction not trained on.
    learner_busy_s          seconds of training; rollout_busy_s: slot-seconds of sampling / slots.
    mean_lag, max_lag       versions between the oldest token and the step that trained on it.
"""

import asyncio
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.clients.cli.bench import Figures
from headrace.clients.cli.benchmarks.overlap_actors import Learner, Rollout
from headrace.clients.cli.benchmarks.overlap_load import Lengths, Load
from headrace.clients.engine import Engine
from headrace.engine.config import Config, load_config
from headrace.engine.errors import DeadlineError, RunError

STALENESS = (4, 1, 0)
_START_S = 60.0
_SLOWEST = 20.0  # times the ideal; later it is given up

_CONFIG = """
[run]
name = "overlap"
folder = "{folder}/runs"
steps = {steps}
[model]
path = "scripted"
[data]
path = "{folder}/prompts.jsonl"
epochs = 1
[schedule]
groups_per_step = {groups_per_step}
group_size = {group_size}
max_staleness = {max_staleness}
max_inflight = {slots}
[rollout]
backend = "scripted"
launch = "external"
max_tokens = {max_tokens}
max_num_seqs = {max_num_seqs}
[learner]
launch = "external"
token_budget = 65536
[reward]
function = "headrace.clients.cli.benchmarks.overlap_reward:score"
[timeouts]
start_s = 60
stop_s = 5
no_progress_s = 60
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One setting's figures; the module's docstring defines them."""

    step_s: float
    measured_s: float
    steps: int
    generated_tokens: int
    trained_tokens: int
    learner_busy_s: float
    rollout_busy_s: float
    mean_lag: float
    max_lag: int

    @property
    def efficiency(self) -> float:
        """Ideal over measured time."""
        return self.steps * self.step_s / self.measured_s

    @property
    def wasted_tokens(self) -> float:
        """Fraction of the generated tokens that no step trained on."""
        return 1 - self.trained_tokens / self.generated_tokens


def run() -> Figures:
    """Measure all settings, one after the other; blocks for less than two minutes."""
    return figures(Load())


def figures(load: Load) -> Figures:
    """The headline at the largest staleness, and each setting below it. Blocks.

    Raises:
        RunError: A run failed.
        DeadlineError: A run took much longer than it ideally would.
    """
    found = {staleness: asyncio.run(measure(load, staleness)) for staleness in STALENESS}
    on_policy_s = found[0].measured_s
    headline = _headline(found[max(STALENESS)], on_policy_s)
    return headline | {f"staleness_{staleness}": _raw(found[staleness], on_policy_s) for staleness in STALENESS}


async def measure(load: Load, max_staleness: int) -> Measured:
    """One run of the engine. Cancelling stops it and ends its processes.

    Raises:
        RunError: The run failed.
        DeadlineError: It took much longer than it ideally would.
    """
    # Of the longest run, so that the step time is the same for all.
    lengths = Lengths(load, load.num_prompts(max(STALENESS)))
    rollout, learner = Rollout(load, lengths), Learner(lengths.step_s)
    limit_s = _START_S + _SLOWEST * load.num_steps(max_staleness) * lengths.step_s
    with tempfile.TemporaryDirectory(prefix="headrace-overlap-") as name:
        folder = Path(name)
        load.write_prompts(folder / "prompts.jsonl", max(STALENESS))
        try:
            async with asyncio.timeout(limit_s):
                await _run(_config(load, max_staleness, folder), rollout, learner, folder)
        except TimeoutError:
            raise DeadlineError(
                f"the run with max_staleness = {max_staleness} was not over within {limit_s:.0f} s; its learner made "
                f"{len(learner.committed_s)} of {load.num_steps(max_staleness)} steps"
            ) from None
    return _figures(load, lengths.step_s, rollout, learner)


def _config(load: Load, max_staleness: int, folder: Path) -> Config:
    text = _CONFIG.format(
        folder=folder,
        steps=load.num_steps(max_staleness),
        groups_per_step=load.groups_per_step,
        group_size=load.group_size,
        max_staleness=max_staleness,
        slots=load.slots,
        max_tokens=load.max_tokens,
        max_num_seqs=load.slots * load.group_size,
    )
    return load_config(None, text=text)


async def _run(config: Config, rollout: Rollout, learner: Learner, folder: Path) -> None:
    """Run the engine with both actors until all three are done; the first failure ends them all."""
    sampling: asyncio.Task[None] | None = None
    training: asyncio.Task[None] | None = None
    try:
        async with Engine(config) as engine:
            sampling = asyncio.create_task(rollout.run(engine.hub_address))
            training = asyncio.create_task(asyncio.to_thread(learner.run, engine.hub_address, folder))
            result, _, _ = await asyncio.gather(engine.wait(), sampling, training)
    finally:
        if sampling is not None and training is not None:
            sampling.cancel()
            # The learner's thread cannot be cancelled; it ends by itself now that the hub is gone.
            await asyncio.gather(sampling, training, return_exceptions=True)
    if result.ended != "finished":
        raise RunError(f"the run {result.ended} after {result.steps} steps: {result.error}")


def _figures(load: Load, step_s: float, rollout: Rollout, learner: Learner) -> Measured:
    assert rollout.backend is not None, "a run that finished has sampled"
    begin_s = learner.committed_s[load.warm_up_steps - 1]
    end_s = learner.committed_s[load.warm_up_steps + load.steps - 1]
    measured = learner.batches[load.warm_up_steps : load.warm_up_steps + load.steps]
    changes = [*rollout.backend.changes, (end_s, 0)]
    within = _overlap_of(begin_s, end_s)
    slot_s = sum(num * within(at_s, next_s) for (at_s, num), (next_s, _) in itertools.pairwise(changes))
    return Measured(
        step_s=step_s,
        measured_s=end_s - begin_s,
        steps=load.steps,
        generated_tokens=rollout.backend.generated_tokens,
        trained_tokens=sum(tokens for tokens, _, _ in learner.batches),
        learner_busy_s=sum(within(*interval) for interval in learner.busy_s),
        rollout_busy_s=slot_s / load.slots,
        mean_lag=sum(lag for _, lag, _ in measured) / len(measured),
        max_lag=max(lag for _, _, lag in measured),
    )


def _overlap_of(begin_s: float, end_s: float) -> Callable[[float, float], float]:
    """How much of an interval lies between the two."""
    return lambda from_s, to_s: max(0.0, min(to_s, end_s) - max(from_s, begin_s))


def _headline(of: Measured, on_policy_s: float) -> dict[str, "float | Figures"]:
    return {
        "efficiency": of.efficiency,
        "speedup_over_on_policy": on_policy_s / of.measured_s,
        "wasted_tokens": of.wasted_tokens,
    }


def _raw(of: Measured, on_policy_s: float) -> Figures:
    return _headline(of, on_policy_s) | {
        "measured_s": of.measured_s,
        "ideal_s": of.steps * of.step_s,
        "steps": float(of.steps),
        "step_time_s": of.step_s,
        "learner_busy_s": of.learner_busy_s,
        "rollout_busy_s": of.rollout_busy_s,
        "generated_tokens": float(of.generated_tokens),
        "trained_tokens": float(of.trained_tokens),
        "mean_lag": of.mean_lag,
        "max_lag": float(of.max_lag),
    }
