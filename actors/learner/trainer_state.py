# pyright: basic
# torch is only partly typed.
"""A trainer's part of a checkpoint: one safetensors file a rank and one JSON file; readable on any number of ranks.

Not torch's distributed checkpoint: its default storage unpickles what it reads, and its safetensors storage holds
everything that it writes in memory a second time.

Invariant: `trainer.json` is written last, after all ranks' tensors are on disk; without it the folder is not complete.
"""

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.actors.learner.checkpoint import sync_path, write_durably
from headrace.actors.learner.sharding import RankGroup
from headrace.actors.learner.state_file import read_state_files, write_state_file
from headrace.engine.errors import FormatError

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

STATE_FILE = "trainer.json"
_FORMAT = 2


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """What is not a tensor.

    Attributes:
        version: Batches consumed.
        updates: Optimizer updates applied.
        nonfinite_streak: Skipped steps in a row at the end.
        controllers: Values of the coefficients that follow measurements, by name.
        files: Sizes in bytes of the tensor files.
    """

    version: int
    updates: int
    nonfinite_streak: int = 0
    controllers: dict[str, float] = {}
    files: dict[str, int] = {}
    format: int = _FORMAT


def save_state(folder: Path, tensors: dict[str, Tensor], state: TrainerState, group: RankGroup) -> None:
    """Write below `folder`; returns on every rank when all is on disk. Collective.

    Raises:
        OSError: The disk of this rank or of another one is full or not writable; the folder stays without its JSON
            file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    group.barrier()
    failure: OSError | None = None
    try:
        file = folder / f"rank-{group.rank:05d}-of-{group.num_ranks:05d}.safetensors"
        write_state_file(file, tensors, writes_whole=group.rank == 0)
    except OSError as error:  # raised when the others know
        failure = error
    (any_failed,) = group.max([float(failure is not None)])
    if failure is not None:
        raise failure
    if any_failed:
        raise OSError(errno.EIO, "another rank could not write its part")
    if group.rank == 0:
        sizes = {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))}
        write_durably(folder / STATE_FILE, msgspec.json.encode(msgspec.structs.replace(state, files=sizes)))
        sync_path(folder)
    group.barrier()


def load_state(folder: Path, tensors: dict[str, Tensor]) -> TrainerState:
    """Read into `tensors`, whatever number of ranks wrote them.

    Raises:
        FormatError: The folder is not a complete checkpoint, or of another model.
    """
    state = _read_json(folder)
    files = {folder / os.path.basename(name): size for name, size in state.files.items()}
    for file, size in files.items():
        if not file.is_file() or file.stat().st_size != size:
            raise FormatError(f"{file} is missing or cut short: the checkpoint is damaged; resume from another one")
    try:
        read_state_files(files, tensors)
    except (FormatError, OSError) as error:
        raise FormatError(f"{folder} does not hold this model's tensors: {error}") from error
    return state


def _read_json(folder: Path) -> TrainerState:
    file = folder / STATE_FILE
    try:
        state = msgspec.json.decode(file.read_bytes(), type=TrainerState)
    except FileNotFoundError as error:
        raise FormatError(f"{folder} has no {STATE_FILE}: it is not a complete checkpoint") from error
    except (OSError, msgspec.DecodeError) as error:
        raise FormatError(f"{file} cannot be read: {error}") from error
    if state.format != _FORMAT:
        raise FormatError(f"{file} has format {state.format}; this version reads {_FORMAT}")
    return state
