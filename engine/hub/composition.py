"""What a run is composed of, by lazy name: the engine imports no role's implementation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from headrace.engine.config import Config
from headrace.engine.errors import FormatError, UsageError
from headrace.engine.hub.early import check_names, check_prompts_last, load_algorithm
from headrace.engine.hub.ports import TablePort
from headrace.engine.hub.waits import WaitBoard
from headrace.engine.interfaces import Algorithm, PromptSource
from headrace.engine.plugins import load_object
from headrace.engine.scheduling.leases import LeaseTable
from headrace.engine.transport.reward import GrpcReward
from headrace.engine.types import PolicyVersion, Prompt

HUB_STATE_FILE = "hub.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a run that the configuration names.

    Attributes:
        source: Training prompts.
        eval_prompts: Held-out prompts; empty without evaluation.
        eval_name: Names the evaluation in the metrics, `eval/<name>/...`.
        algorithm: Assigns credit on the hub.
    """

    config: Config
    source: PromptSource
    eval_prompts: list[Prompt]
    eval_name: str
    algorithm: Algorithm

    def make_reward(self, address: str) -> GrpcReward:
        """A client of the reward: of the child that serves `reward.function` at `address`, or of `reward.address`."""
        reward = self.config.reward
        if reward.function:
            # Our own child serves once it has imported the function, and ends the run if it cannot.
            start_s = self.config.timeouts.start_s
            reward = msgspec.structs.replace(reward, function="", address=address, connect_timeout_s=start_s)
        return GrpcReward.from_config(reward)


def compose(config: Config) -> Parts:
    """Load what the configuration names. Blocks while data are read.

    Raises:
        UsageError: A name, a file or an entry point does not exist; one sentence says which.
    """
    check_names(config)
    create_source = cast(Any, load_object("headrace.actors.prompts.create:create_source"))
    create_eval_source = cast(Any, load_object("headrace.actors.prompts.create:create_eval_source"))
    algorithm = load_algorithm(config)
    source = cast(PromptSource, create_source(config))
    check_prompts_last(config, source)
    return Parts(
        config=config,
        source=source,
        eval_prompts=cast("list[Prompt]", create_eval_source(config)),
        eval_name=config.data.task or Path(config.eval.path or config.data.path).stem or "eval",
        algorithm=algorithm,
    )


def make_table(name: str, columns: tuple[str, ...], config: Config, board: WaitBoard, first_step: int) -> TablePort:
    """A table of the buffer whose waits are on the board."""
    table_class = cast(Any, load_object("headrace.buffers.table:Table"))
    async_class = cast(Any, load_object("headrace.buffers.async_table:AsyncTable"))
    table = table_class(
        name,
        required_columns=columns,
        capacity_records=config.buffer.capacity_records,
        capacity_bytes=config.buffer.capacity_bytes,
    )
    return cast(TablePort, async_class(table, LeaseTable(first_step=first_step), board=board))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a run goes on: a complete checkpoint and the hub's part of it.

    Attributes:
        version: What the run begins with: the checkpoint's step under a new incarnation.
    """

    version: PolicyVersion
    checkpoint: Path
    prompts: dict[str, Any]


class _HubState(msgspec.Struct):
    version: tuple[int, int]
    step: int
    prompts: dict[str, Any]


def newest_checkpoint(run_folder: Path) -> Path | None:
    """The newest complete checkpoint of a run folder, or None."""
    find_latest = cast(Any, load_object("headrace.actors.learner.checkpoint:find_latest"))
    return cast("Path | None", find_latest(run_folder / "checkpoints"))


def find_resume(run_folder: Path) -> Resume:
    """The newest complete checkpoint of a run folder.

    Raises:
        UsageError: There is none.
        FormatError: The hub's part of it cannot be read.
    """
    checkpoint = newest_checkpoint(run_folder)
    if checkpoint is None:
        raise UsageError(f"{run_folder} has no complete checkpoint to resume from; start the run anew without --resume")
    path = checkpoint / HUB_STATE_FILE
    try:
        state = msgspec.json.decode(path.read_bytes(), type=_HubState)
    except (OSError, msgspec.DecodeError) as error:
        raise FormatError(f"{path} cannot be read: {error}") from error
    incarnation, version = state.version
    return Resume(version=PolicyVersion(incarnation + 1, version), checkpoint=checkpoint, prompts=state.prompts)
