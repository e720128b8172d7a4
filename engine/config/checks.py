"""What must hold between settings. Each message names the settings, what was given and what to change."""

from headrace.engine.config.schema import Config
from headrace.engine.errors import ConfigError

# Methods whose advantage compares the samples of one prompt with each other.
GROUP_RELATIVE = frozenset({"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"})

# Methods whose loss is a mean over tokens or sequences unless `algorithm.normalization` says otherwise.
WITHOUT_CONSTANT = GROUP_RELATIVE - {"dr_grpo"} | {"reinforce_plus_plus", "ppo", "distillation", "dpo", "sft"}

# Sources that read prompts that exist; held-out ones have to exist too.
FILE_SOURCES = frozenset({"jsonl", "parquet", "hf"})


def check_relations(config: Config) -> None:
    """Check a configuration whose single values are sound.

    Raises:
        ConfigError: The first relation that does not hold.
    """
    _check_staleness(config)
    _check_groups(config)
    _check_step(config)
    _check_model(config)
    _check_reward(config)
    _check_eval(config)


def _check_staleness(config: Config) -> None:
    lag, sync = config.schedule.max_staleness, config.schedule.weight_sync_steps
    # Between two publishes the sampler falls sync - 1 versions behind; a tighter bound would admit nothing.
    if lag < sync - 1:
        raise ConfigError(
            f"schedule.max_staleness = {lag} can never hold with schedule.weight_sync_steps = {sync}: samples are "
            f"up to {sync - 1} versions old before new weights arrive; "
            f"set max_staleness to at least {sync - 1} or weight_sync_steps to at most {lag + 1}"
        )


def _check_groups(config: Config) -> None:
    size, name = config.schedule.group_size, config.algorithm.name
    if size == 1 and name in GROUP_RELATIVE:
        raise ConfigError(
            f'schedule.group_size = 1 with algorithm.name = "{name}" can never learn: the method compares samples '
            "of one prompt with each other; set group_size to at least 2 or choose another algorithm"
        )
    batch = size * config.schedule.groups_per_step
    if config.buffer.capacity_records < batch:
        raise ConfigError(
            f"buffer.capacity_records = {config.buffer.capacity_records} cannot hold one step's batch of {batch} "
            "records (schedule.group_size x schedule.groups_per_step); raise the capacity or make the batch smaller"
        )


def _check_step(config: Config) -> None:
    algorithm, schedule = config.algorithm, config.schedule
    own = algorithm.normalization == "auto" and algorithm.name not in WITHOUT_CONSTANT
    if algorithm.length_constant and not own and algorithm.normalization != "constant":
        raise ConfigError(
            f"algorithm.length_constant = {algorithm.length_constant} has no effect with algorithm.name = "
            f'"{algorithm.name}" and algorithm.normalization = "{algorithm.normalization}"; set normalization = '
            '"constant", or length_constant = 0'
        )
    if algorithm.name == "reinforce_plus_plus" and schedule.group_size * schedule.groups_per_step == 1:
        raise ConfigError(
            'schedule.group_size = 1 and schedule.groups_per_step = 1 with algorithm.name = "reinforce_plus_plus" can '
            "never learn: the method compares the samples of a step with each other; raise one of the two"
        )
    if config.learner.kl_target and schedule.max_staleness == 0:
        raise ConfigError(
            f"learner.kl_target = {config.learner.kl_target:g} with schedule.max_staleness = 0 would only raise the "
            "learning rate: samples come from the policy that is trained, so their distance does not tell how far an "
            "update went; set learner.kl_target = 0, or max_staleness to at least 1"
        )


def _check_reward(config: Config) -> None:
    function, address = config.reward.function, config.reward.address
    if function and address:
        raise ConfigError(
            f'reward.function = "{function}" and reward.address = "{address}" are both set; '
            "keep the one that shall score"
        )
    if not function and not address:
        raise ConfigError(
            'neither reward.function nor reward.address is set; give a function as "module:function" or the address '
            'of a reward server as "grpc://HOST:PORT"'
        )
    if address and not address.startswith(("grpc://", "unix:")):
        raise ConfigError(f'reward.address = "{address}" is not allowed: write "grpc://HOST:PORT" or "unix:/path"')
    if function and ":" not in function:
        raise ConfigError(f'reward.function = "{function}" is not allowed: write "module:function"')


def _check_model(config: Config) -> None:
    if not config.model.path:
        raise ConfigError('model.path is empty; give a folder, a hub name or "package://PACKAGE/FILE.gguf"')
    response, context = config.rollout.max_tokens, config.model.max_context_tokens
    if response >= context:
        raise ConfigError(
            f"rollout.max_tokens = {response} leaves no room for a prompt in model.max_context_tokens = {context}; "
            "lower max_tokens or raise max_context_tokens"
        )


def _check_eval(config: Config) -> None:
    if config.eval.num_prompts > 0 and config.data.source in FILE_SOURCES and not config.eval.path:
        raise ConfigError(
            f'eval.num_prompts = {config.eval.num_prompts} with data.source = "{config.data.source}" needs eval.path, '
            "the held-out prompts; set eval.path, or eval.num_prompts = 0 for no evaluation"
        )
