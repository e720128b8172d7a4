"""The prompts of a run, from its configuration: the training source and the held-out set."""

from collections.abc import Set

from headrace.actors.prompts.build import PromptFormat, prompt_text
from headrace.actors.prompts.function import FunctionRows
from headrace.actors.prompts.hub_dataset import HubDatasetRows
from headrace.actors.prompts.jsonl import JsonlRows
from headrace.actors.prompts.parquet import ParquetRows
from headrace.actors.prompts.reasoning_gym import ReasoningGymRows
from headrace.actors.prompts.table import Rows, TableSource, distinct_prompts
from headrace.engine.config.schema import Config, DataConfig
from headrace.engine.errors import ConfigError
from headrace.engine.types import Prompt

# Generated tasks repeat themselves; so many times the wanted number is looked through for different ones.
_EVAL_OVERSAMPLING = 20


def create_source(config: Config, excluded: Set[str] | None = None) -> TableSource:
    """The training source. Blocks while a file is read or a data set is loaded.

    Args:
        config: Sections data and eval.
        excluded: Texts (`prompt_text`) that are left out; by default those of `create_eval_source(config)`.

    Raises:
        ConfigError: The data cannot be found, read or made prompts; one sentence says what to change.
    """
    if excluded is None:
        excluded = {prompt_text(prompt) for prompt in create_eval_source(config)}
    data = config.data
    rows = _rows(data, data.path, data.seed, data.size)
    return TableSource(
        rows, PromptFormat.from_config(data), seed=data.seed + config.run.seed, epochs=data.epochs, excluded=excluded
    )


def create_eval_source(config: Config) -> list[Prompt]:
    """The held-out prompts: always the same ones, all different, `eval.num_prompts` of them.

    reasoning_gym generates them with `eval.seed`. The other sources take the first rows of `eval.path`, or, where that
    is empty, rows of the training data drawn with `eval.seed`, which training then leaves out.

    Raises:
        ConfigError: See `create_source`; or there are fewer different prompts than asked for.
    """
    data, held_out = config.data, config.eval
    if not held_out.num_prompts:
        return []
    prompt_format = PromptFormat.from_config(data)
    if data.source == "reasoning_gym":
        rows = _rows(data, "", held_out.seed, held_out.num_prompts * _EVAL_OVERSAMPLING)
        return distinct_prompts(rows, prompt_format, held_out.num_prompts, seed=None)
    try:
        rows = _rows(data, held_out.path or data.path, data.seed, data.size)
    except ConfigError as error:
        raise ConfigError(f"eval.path = {held_out.path!r}: {error}" if held_out.path else str(error)) from error
    seed = None if held_out.path else held_out.seed
    return distinct_prompts(rows, prompt_format, held_out.num_prompts, seed=seed)


def _rows(data: DataConfig, path: str, seed: int, size: int) -> Rows:
    if data.source == "reasoning_gym":
        if not data.task:
            raise ConfigError('data.source = "reasoning_gym" needs data.task, e.g. "chain_sum"')
        return ReasoningGymRows(data.task, size, seed, data.options, data.prompt_key)
    if not path:
        raise ConfigError(f'data.source = "{data.source}" needs data.path; it is empty')
    match data.source:
        case "jsonl":
            return JsonlRows(path, data.prompt_key)
        case "parquet":
            return ParquetRows(path)
        case "hf":
            return HubDatasetRows(path, data.options)
        case "function":
            return FunctionRows(path, data.options, size, data.prompt_key)
