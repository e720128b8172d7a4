"""The configuration of a run: one struct a section, unknown keys refused.

Each field's comment is its documentation: `headrace config schema` prints it. Names follow what users of this field
know; `ALIASES` holds the other names that are understood.
"""

from typing import Annotated, Literal

from msgspec import Meta

from headrace.engine.config.algorithm import AlgorithmConfig
from headrace.engine.config.fields import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

# Other names of `section.key`, each with the canonical one.
ALIASES = {
    "schedule.max_off_policy_steps": "schedule.max_staleness",
    "schedule.max_head_offpolicyness": "schedule.max_staleness",
    "schedule.num_generations": "schedule.group_size",
    "learner.max_tokens_per_gpu": "learner.token_budget",
    "learner.lr": "learner.learning_rate",
}


class RunConfig(Section, frozen=True, kw_only=True):
    """The run as a whole."""

    name: str = "run"  # the run folder is <folder>/<name>-<date>
    folder: str = "runs"
    steps: Positive = 100  # optimizer steps
    seed: NonNegative = 0  # of the order of the prompts
    hub: Literal["process", "inproc"] = "process"  # where the engine's hub runs; a child process by default


class ModelConfig(Section, frozen=True, kw_only=True):
    """The model that is trained and sampled from."""

    path: str = ""  # a folder, a hub name, or package://python_package/file.gguf
    # Of the published weights and of inference; auto is bfloat16 where the hardware multiplies it, float32 elsewhere.
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_context_tokens: Positive = 2048  # prompt and response together


class DataConfig(Section, frozen=True, kw_only=True):
    """Where prompts come from."""

    source: Literal["reasoning_gym", "jsonl", "parquet", "hf", "function"] = "jsonl"
    path: str = ""  # file, data set name, or module:function
    task: str = ""  # reasoning_gym: the data set's name
    options: dict[str, str | int | float | bool | None] = {}  # passed to the source
    size: Positive = 10_000  # generated sources: prompts an epoch
    seed: NonNegative = 0
    epochs: NonNegative = 0  # 0: as many as needed
    system_prompt: str = ""
    instruction: str = ""  # appended to each user turn
    prompt_key: str = "prompt"  # column that holds the prompt; the other columns become the prompt's data


class RolloutConfig(Section, frozen=True, kw_only=True):
    """Sampling and the inference engines."""

    backend: Literal["auto", "vllm", "transformers", "scripted"] = "auto"
    num_workers: Positive = 1
    launch: Literal["engine", "external"] = "engine"  # external: workers are started by others and join the hub
    threads: Positive = 1  # CPU threads of each engine
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    max_tokens: Positive = 256
    stop: tuple[str, ...] = ()
    kv_cache_bytes: Positive = 256 << 20  # vLLM
    max_num_seqs: Positive = 64
    gpu_memory_utilization: Annotated[float, Meta(gt=0, lt=1)] = 0.45  # vLLM on a GPU
    request_timeout_s: PositiveFloat = 300.0  # one group, from dispatch to its last record
    request_retries: NonNegative = 3
    overlong_prompt: Literal["fail", "drop"] = "fail"  # what a prompt that does not fit the context does
    partial_rollout: bool = True  # requests go on across a weight update


class ScheduleConfig(Section, frozen=True, kw_only=True):
    """Batches, groups and how stale samples may be."""

    group_size: Positive = 8  # samples of one prompt
    groups_per_step: Positive = 8
    max_staleness: NonNegative = 1  # versions between the oldest token and the step that trains on it; 0: on-policy
    staleness_measure: Literal["oldest", "mean", "newest"] = "oldest"
    stale_policy: Literal["wait", "drop"] = "wait"
    weight_sync_steps: Positive = 1  # publish every so many steps
    max_inflight: NonNegative = 0  # groups running at once over all engines; 0: the staleness window


class LearnerConfig(Section, frozen=True, kw_only=True):
    """The trainer."""

    num_ranks: Positive = 1
    launch: Literal["engine", "external"] = "engine"  # external: ranks are started by others (torchrun, ...)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: NonNegative = 0  # CPU threads a rank; 0: what the machine has
    learning_rate: PositiveFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.95
    adam_eps: PositiveFloat = 1e-8
    warmup_steps: NonNegative = 0  # updates over which the rate rises linearly
    decay_steps: NonNegative = 0  # updates over which it falls linearly to 0; 0: it does not fall
    # Nats a token between sampler and learner that the rate is steered to, within a hundredth and ten times of what the
    # schedule says; 0: the schedule alone.
    kl_target: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    token_budget: Positive = 4096  # tokens of one packed micro-batch
    mixed_precision: Literal["auto", "bf16", "fp16", "no"] = "auto"  # auto: bf16 where the hardware multiplies it
    sharding_strategy: Literal["full_shard"] = "full_shard"
    max_nonfinite_steps: Positive = 10  # skipped steps in a row that end the run
    checkpoint_steps: NonNegative = 0  # 0: only at the end
    keep_checkpoints: Positive = 2
    step_timeout_s: PositiveFloat = 1800.0


class WeightsConfig(Section, frozen=True, kw_only=True):
    """How new weights reach the inference engines."""

    # The whole state is published every so many versions at least, what changed in between; 1: always the whole state.
    # Also whenever an engine takes no deltas, and when the deltas have come to outweigh the state.
    keyframe_steps: Positive = 25


class RewardConfig(Section, frozen=True, kw_only=True):
    """How samples are scored."""

    function: str = ""  # module:function, run in a killable pool of ours
    address: str = ""  # grpc://HOST:PORT or unix:/path of a RewardService; instead of function
    num_workers: Positive = 2  # processes of the pool
    timeout_s: PositiveFloat = 30.0  # one sample
    batch_size: Positive = 64
    max_concurrency: Positive = 4  # batches in flight to a service
    retries: NonNegative = 3
    on_failure: Literal["requeue", "drop", "impute", "fail"] = "requeue"  # a sample that got no value
    impute_value: float = 0.0  # with on_failure = "impute"
    connect_timeout_s: PositiveFloat = 20.0


class BufferConfig(Section, frozen=True, kw_only=True):
    """The table between sampling and learning."""

    capacity_records: Positive = 65_536
    capacity_bytes: Positive = 1 << 30


class EvalConfig(Section, frozen=True, kw_only=True):
    """Held-out prompts, scored between steps."""

    num_prompts: NonNegative = 0  # 0: no evaluation
    every_steps: NonNegative = 0  # 0: at the start and the end only
    seed: NonNegative = 1_000_003  # generated sources: of the held-out set
    path: str = ""  # file sources: the held-out file
    temperature: NonNegativeFloat = 0.0  # 0 is greedy
    threshold: float = 1.0  # a reward of at least this much counts as right


class TimeoutConfig(Section, frozen=True, kw_only=True):
    """Deadlines of waits that no other section sets, in seconds."""

    start_s: PositiveFloat = 600.0  # every role up and ready
    stop_s: PositiveFloat = 10.0  # grace period of an orderly end
    heartbeat_s: PositiveFloat = 60.0  # a member that shows no progress for so long outside loading is lost
    no_progress_s: PositiveFloat = 900.0  # nothing trained, scored or sampled for so long ends the run


class Config(Section, frozen=True, kw_only=True):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    buffer: BufferConfig = BufferConfig()
    eval: EvalConfig = EvalConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
