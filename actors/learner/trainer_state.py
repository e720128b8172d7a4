# pyright: basic
# torch is only partly typed.
"""A trainer's part of a checkpoint: sharded safetensors and one JSON file; readable on any number of ranks.

torch's distributed checkpoint with its safetensors storage; its default storage would unpickle what it reads.

Invariant: `trainer.json` is written last, after all ranks' tensors are on disk; without it the folder is not complete.
"""

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from headrace.actors.learner.checkpoint import sync_path, write_durably
from headrace.actors.learner.sharding import RankGroup
from headrace.engine.errors import FormatError

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

STATE_FILE = "trainer.json"
_FORMAT = 1


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """What is not a tensor.

    Attributes:
        version: Batches consumed.
        updates: Optimizer updates applied.
        nonfinite_streak: Skipped steps in a row at the end.
        files: Sizes in bytes of the tensor files.
    """

    version: int
    updates: int
    nonfinite_streak: int = 0
    files: dict[str, int] = {}
    format: int = _FORMAT


def save_state(folder: Path, tensors: dict[str, Tensor], state: TrainerState, group: RankGroup) -> None:
    """Write below `folder`; returns on every rank when all is on disk. Collective.

    Raises:
        OSError: The disk is full or not writable; the folder stays without its JSON file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    group.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the storage's notes about its own API
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    for file in folder.glob(f"shard-{group.rank + 1:05d}-*.safetensors"):
        sync_path(file)
    group.barrier()
    if group.rank == 0:
        sizes = {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))}
        write_durably(folder / STATE_FILE, msgspec.json.encode(msgspec.structs.replace(state, files=sizes)))
        sync_path(folder)
    group.barrier()


def load_state(folder: Path, tensors: dict[str, Tensor]) -> TrainerState:
    """Read into `tensors`, whatever number of ranks wrote them. Collective.

    Raises:
        FormatError: The folder is not a complete checkpoint, or of another model.
    """
    state = _read_json(folder)
    for name, size in state.files.items():
        file = folder / os.path.basename(name)
        if not file.is_file() or file.stat().st_size != size:
            raise FormatError(f"{file} is missing or cut short: the checkpoint is damaged; resume from another one")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))
    except (CheckpointException, RuntimeError, ValueError, KeyError, OSError) as error:
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
