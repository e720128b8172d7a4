"""Publishing whole named tensors, for those who train elsewhere: one rank, whatever framework holds them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.engine.errors import ConfigError, InputError
from headrace.engine.transport.weights import WeightPublisher
from headrace.engine.types import PolicyVersion, TensorSpec
from headrace.engine.weights.handover import Handover, PartTaker
from headrace.engine.weights.layout import raw_dtype
from headrace.engine.weights.sender import HostBits, Shard, WeightSender
from headrace.engine.weights.ulp import RawArray

_DTYPES = ("bfloat16", "float16", "float32")


class HasDlpack(Protocol):
    """An array of any framework, in the host's memory."""

    def __dlpack__(self) -> object: ...


class HasNumpy(Protocol):
    """An array that gives itself as numpy's."""

    def numpy(self) -> npt.NDArray[Any]: ...


# An array of float32 or float16, a tensor (also of bfloat16), or an element type's name and the bits.
TensorLike = npt.NDArray[Any] | HasDlpack | HasNumpy | tuple[str, npt.NDArray[np.uint16 | np.uint32]]


class TensorPublisher:
    """Publishes whole states: what changed since the one before, or all of it. Blocking; for one thread at a time.

    It keeps a copy of what was published last: the state's size in the published types.

    Args:
        hub: Takes the parts.
        run_id: Of the run.
        payload_dirs, say: See `Handover`.
        keyframe_steps: See `KeyframePolicy`.
    """

    def __init__(
        self,
        hub: PartTaker,
        *,
        run_id: str,
        payload_dirs: Sequence[Path],
        say: Callable[[str], None],
        keyframe_steps: int,
    ) -> None:
        self._handover = Handover(hub, payload_dirs, say)
        self._run_id = run_id
        self._keyframe_steps = keyframe_steps
        self._sender: WeightSender[RawArray] | None = None

    def publish(self, tensors: Mapping[str, TensorLike], version: PolicyVersion) -> bool:
        """Publish a state; blocks until the hub has it. True when the version exists now.

        Args:
            tensors: Under the checkpoint's names, in one order for all versions; a tied tensor once. They are copied.
            version: Newer than any published before.

        Raises:
            InputError: There is no tensor, or one is of a type or in a memory that cannot be published.
            WeightUpdateError: A newer version is published.
            FencedError: A successor has taken over.
            StorageError: There is no room for the payload.
        """
        if not tensors:
            raise InputError("no tensor was given; publish the whole state, under the checkpoint's names")
        found = [tensor_bits(name, value) for name, value in tensors.items()]
        specs = tuple(spec for spec, _ in found)
        if self._sender is None or self._sender.tensors != specs:
            self._sender = WeightSender(
                specs, run_id=self._run_id, rank=0, keyframe_steps=self._keyframe_steps, bits=HostBits()
            )
        shards = [
            Shard(tensor_index=index, runs=((0, len(bits)),), elements=bits)
            for index, (_, bits) in enumerate(found)
            if len(bits)
        ]
        full = self._sender.needs_keyframe(version, self._handover.since)
        return self._handover.publish(self._sender.stage(version, shards, full=full))


def run_publisher(
    address: str,
    *,
    run_id: str,
    fencing_token: int,
    payload_dir: str,
    run_folder: str,
    num_ranks: int,
    keyframe_steps: int,
    say: Callable[[str], None],
) -> tuple[WeightPublisher, TensorPublisher]:
    """The line to a run's hub, which the caller closes, and the publisher upon it.

    Raises:
        ConfigError: The run awaits parts of several ranks.
    """
    if num_ranks != 1:
        raise ConfigError(
            f"learner.num_ranks = {num_ranks} awaits a part of each rank; set it to 1 to publish whole tensors, or "
            "publish the ranks' parts with TrainerClient.publish"
        )
    line = WeightPublisher(address, rank=0, num_ranks=1, fencing_token=fencing_token)
    folders = [Path(payload_dir), Path(run_folder) / "weights"]
    publisher = TensorPublisher(line, run_id=run_id, payload_dirs=folders, say=say, keyframe_steps=keyframe_steps)
    return line, publisher


def tensor_bits(name: str, value: TensorLike) -> tuple[TensorSpec, RawArray]:
    """What a tensor is called, and a flat copy of its bits.

    Raises:
        InputError: The element type is none of bfloat16, float16 and float32, or the array is not in the host's memory.
    """
    dtype, array = value if isinstance(value, tuple) else _as_numpy(name, value)
    if dtype not in _DTYPES:
        raise InputError(f"tensor {name!r} has the element type {dtype!r}; allowed are {', '.join(_DTYPES)}")
    if array.dtype.itemsize != np.dtype(raw_dtype(dtype)).itemsize:
        raise InputError(f"tensor {name!r} is to be {dtype} and was given as {array.dtype}, which has another width")
    bits: RawArray = np.array(array, order="C").reshape(-1).view(raw_dtype(dtype))
    return TensorSpec(name=name, dtype=dtype, shape=tuple(array.shape)), bits


def _as_numpy(name: str, value: Any) -> tuple[str, npt.NDArray[Any]]:
    torch: Any = sys.modules.get("torch")  # who has a tensor has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        tensor: Any = value
        tensor = tensor.detach().cpu()
        if tensor.dtype == torch.bfloat16:  # numpy has no such type
            return "bfloat16", tensor.contiguous().view(torch.int16).numpy()
        return str(tensor.dtype).removeprefix("torch."), tensor.numpy()
    try:
        if hasattr(value, "numpy"):
            value = value.numpy()
        array: npt.NDArray[Any] = np.asarray(value) if hasattr(value, "__array__") else np.from_dlpack(value)
    except (AttributeError, TypeError, ValueError, BufferError, RuntimeError) as error:
        raise InputError(
            f"tensor {name!r} is a {type(value).__name__} that gives no array ({error}); pass a numpy array in the "
            'host\'s memory, bfloat16 as ("bfloat16", its bits as uint16)'
        ) from error
    return str(array.dtype), array
