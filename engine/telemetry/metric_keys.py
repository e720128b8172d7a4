"""The metrics of a step: every key, how its parts become one figure, its unit and what it says.

docs/metrics.md says the same for readers; a test keeps the two in step.
"""

import difflib
from collections.abc import Iterable
from typing import Literal

import msgspec

from headrace.engine.errors import SchemaError

# How the parts that are added during a step become one figure. "mean" is weighted by each part's weight.
Reduction = Literal["mean", "sum", "max", "min", "last"]


class MetricKey(msgspec.Struct, frozen=True):
    """One declared key; a name that ends in `*` stands for all names with that beginning."""

    name: str
    reduction: Reduction
    unit: str
    text: str

    def matches(self, name: str) -> bool:
        """Whether this declaration covers `name`."""
        if self.name.endswith("*"):
            return name.startswith(self.name[:-1]) and len(name) >= len(self.name)
        return name == self.name


METRIC_KEYS: tuple[MetricKey, ...] = (
    MetricKey("actor/loss", "mean", "", "the whole loss, as the method normalises it, without rejected tokens"),
    MetricKey("actor/pg_loss", "mean", "", "policy-gradient loss, mean over the step's loss tokens not rejected"),
    MetricKey("actor/entropy", "mean", "nats", "entropy of the current policy, mean over loss tokens"),
    MetricKey("actor/ppo_kl", "mean", "nats", "proximal minus current log-probability, mean over loss tokens"),
    MetricKey("actor/kl", "mean", "nats", "KL term against the reference policy, mean over loss tokens"),
    MetricKey("actor/pg_clipfrac", "mean", "fraction", "loss tokens whose ratio was clipped"),
    MetricKey("actor/grad_norm", "mean", "", "global gradient norm before clipping"),
    MetricKey("actor/lr", "last", "", "learning rate of the step"),
    MetricKey("actor/skipped", "sum", "count", "optimizer steps skipped (gradient not finite, or no token took part)"),
    MetricKey("actor/*", "mean", "", "further figures of an algorithm, mean over loss tokens"),
    MetricKey("critic/score/mean", "mean", "", "the scorer's raw value of the samples trained on, each counted once"),
    MetricKey("critic/rewards/mean", "mean", "", "reward after shaping of the samples trained on, each counted once"),
    MetricKey("critic/rewards/max", "max", "", "highest reward among them"),
    MetricKey("critic/rewards/min", "min", "", "lowest reward among them"),
    MetricKey("critic/advantages/mean", "mean", "", "advantage, mean over loss tokens"),
    MetricKey("critic/*", "mean", "", "further figures of rewards, advantages and values"),
    MetricKey("response_length/mean", "mean", "tokens", "response tokens of a sample"),
    MetricKey("response_length/max", "max", "tokens", "longest response of the step"),
    MetricKey("response_length/clip_ratio", "mean", "fraction", "samples that ended at max_tokens"),
    MetricKey("timing_s/step", "sum", "s", "from one finished step to the next"),
    MetricKey("timing_s/*", "sum", "s", "one part of the step: wait, assemble, train, publish, checkpoint, eval"),
    MetricKey("perf/throughput", "last", "tokens/s", "response tokens trained on, per second of timing_s/step"),
    MetricKey("perf/mfu", "last", "fraction", "model FLOPs of the step over the device's peak, where that is known"),
    MetricKey("perf/*", "last", "", "further rates, such as tokens sampled a second"),
    MetricKey("off_policy/mean", "mean", "versions", "lag: the step's version minus each sample's version"),
    MetricKey("off_policy/max", "max", "versions", "largest lag in the batch"),
    MetricKey("off_policy/dropped", "sum", "groups", "groups that were dropped as too stale since the last step"),
    MetricKey("off_policy/dropped_tokens", "sum", "tokens", "response tokens in the groups dropped as too stale"),
    MetricKey("off_policy/in_queue", "last", "groups", "groups that wait to be trained on"),
    MetricKey("off_policy/in_flight", "last", "groups", "groups that are being sampled or scored"),
    MetricKey("mismatch_kl/mean", "mean", "nats", "sampler minus learner log-probability of the same tokens"),
    MetricKey("importance/ess", "mean", "fraction", "effective sample size of the weights over loss tokens"),
    MetricKey("importance/rejected_fraction", "mean", "fraction", "loss tokens that a correction rejected"),
    MetricKey("importance/*", "mean", "", "correction weights: mean, mean and largest untruncated, mean absolute gap"),
    MetricKey("reward/failed", "sum", "samples", "samples that got no value (timeout, error, abstention)"),
    MetricKey("reward/latency_s", "mean", "s", "from a finished sample to its reward"),
    MetricKey("reward/*", "mean", "", "extra figures that a reward function returns"),
    MetricKey("groups/*", "sum", "groups", "what became of groups since the last step: trained, dropped, requeued"),
    MetricKey("buffer/add", "sum", "records", "records added since the last step"),
    MetricKey("buffer/evict", "sum", "records", "records evicted since the last step"),
    MetricKey("buffer/sample", "sum", "records", "records leased for a step since the last step"),
    MetricKey("buffer/*", "last", "", "how full the buffer is"),
    MetricKey("weights/density", "mean", "fraction", "elements that changed in an update"),
    MetricKey("weights/encode_s", "max", "s", "longest time that a rank took to find and encode what changed"),
    MetricKey("weights/wire_bytes", "sum", "bytes", "payload of the updates sent to one receiver"),
    MetricKey("weights/pause_s", "max", "s", "longest time that an engine stood still for an update"),
    MetricKey("weights/apply_s", "max", "s", "longest time from an update's arrival to its being served"),
    MetricKey("weights/fetch_s", "max", "s", "longest time that a payload took to reach another host"),
    MetricKey(
        "weights/lag", "max", "versions", "how far behind the newest version an engine was when it had applied one"
    ),
    MetricKey("weights/*", "last", "", "further figures of weight updates"),
    MetricKey("event_loop_lag_s", "max", "s", "how late the hub's event loop was at worst"),
    MetricKey("idle_ratio/learner", "last", "fraction", "of the step's time in which the learner did no work"),
    MetricKey("idle_ratio/rollout", "last", "fraction", "the same for rollout workers, mean over them"),
    MetricKey("idle_ratio/reward", "last", "fraction", "the same for rewards"),
    MetricKey("idle_ratio/*", "last", "fraction", "the same for another role"),
    MetricKey("overlap/sampling", "last", "fraction", "of the learner's step time during which sampling ran as well"),
    MetricKey("eval/rewards/mean", "mean", "", "reward of the held-out prompts, each prompt counted once"),
    MetricKey("eval/accuracy", "mean", "fraction", "held-out prompts with a reward of at least eval.threshold"),
    MetricKey("eval/num_prompts", "sum", "prompts", "held-out prompts that were scored"),
    MetricKey("eval/*", "mean", "", "further figures of an evaluation"),
)


def declared(name: str, extra: Iterable[MetricKey] = ()) -> MetricKey:
    """The declaration that covers `name`: `extra` first, an exact name before a `*`, the longest `*` before a shorter.

    Raises:
        SchemaError: Nothing covers it; the message names the nearest declared key.
    """
    keys = [*extra, *METRIC_KEYS]
    best: MetricKey | None = None
    for key in keys:
        if key.name == name:
            return key
        if key.matches(name) and (best is None or len(key.name) > len(best.name)):
            best = key
    if best is not None:
        return best
    near = difflib.get_close_matches(name, [key.name for key in keys], n=1)
    hint = f"; the nearest is {near[0]!r}" if near else ""
    raise SchemaError(f"metric {name!r} is not declared{hint}: use a declared key or pass a MetricKey for it")
