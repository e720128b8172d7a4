"""Where each tensor of a checkpoint lies in a dense payload, and the hash that names this arrangement.

The layout is a pure function of the tensors' order, dtypes and shapes, so every rank and every receiver computes
the same offsets and none of them is sent. Each tensor starts at a multiple of `ALIGNMENT` bytes; gaps are zero.
"""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from headrace.engine.errors import FormatError
from headrace.engine.types import TensorSpec

# A cache line, and what vector loads like.
ALIGNMENT = 64

# Elements of a bucket, at most. A bucket never crosses a multiple of this number in its flattened tensor.
BUCKET_ELEMENTS = 4 << 20

# No file is larger than this; sizes above are nonsense, and everything below fits a signed 64-bit offset.
MAX_PAYLOAD_BYTES = 1 << 62

MAX_DIMENSIONS = 16

# Raw views: numpy has no bfloat16, and a payload is moved, never computed with.
_RAW_DTYPES: dict[str, np.dtype[np.uint16] | np.dtype[np.uint32]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<u2"),
    "float32": np.dtype("<u4"),
}


def raw_dtype(dtype: str) -> npt.DTypeLike:
    """The unsigned integer dtype that has as many bits as `dtype`, little-endian.

    Raises:
        FormatError: The dtype is not one that a payload may hold.
    """
    try:
        return _RAW_DTYPES[dtype]
    except KeyError:
        raise FormatError(f"A tensor has dtype {dtype!r}; a weight payload holds {', '.join(_RAW_DTYPES)}.") from None


def element_bytes(spec: TensorSpec) -> int:
    """Bytes of one element.

    Raises:
        FormatError: The dtype is not one that a payload may hold.
    """
    return np.dtype(raw_dtype(spec.dtype)).itemsize


def num_elements(spec: TensorSpec) -> int:
    """Elements of the tensor; 1 for a scalar.

    Raises:
        FormatError: A dimension is negative, there are too many, or the tensor is larger than any file.
    """
    if len(spec.shape) > MAX_DIMENSIONS:
        raise FormatError(
            f"Tensor {spec.name!r} has {len(spec.shape)} dimensions; at most {MAX_DIMENSIONS} are allowed."
        )
    count = 1
    for size in spec.shape:
        if size < 0:
            raise FormatError(f"Tensor {spec.name!r} has the shape {spec.shape}; dimensions must not be negative.")
        count *= size
        if count > MAX_PAYLOAD_BYTES:
            raise FormatError(f"Tensor {spec.name!r} of shape {spec.shape} is larger than any payload can be.")
    return count


def tensor_offsets(tensors: Sequence[TensorSpec]) -> tuple[int, ...]:
    """Byte offset of each tensor, and as the last entry the size of the whole payload.

    Raises:
        FormatError: A dtype or shape is not allowed, a name is used twice, or the payload is larger than any file.
    """
    names: set[str] = set()
    offsets: list[int] = []
    position = 0
    for spec in tensors:
        if spec.name in names:
            raise FormatError(f"The tensor name {spec.name!r} is used twice; names in a layout must be unique.")
        names.add(spec.name)
        offsets.append(position)
        position += num_elements(spec) * element_bytes(spec)
        position += -position % ALIGNMENT
        if position > MAX_PAYLOAD_BYTES:
            raise FormatError(f"The layout's {len(tensors)} tensors together are larger than any payload can be.")
    return (*offsets, position)


def payload_size(tensors: Sequence[TensorSpec]) -> int:
    """Bytes of a dense payload of these tensors, padding included.

    Raises:
        FormatError: As `tensor_offsets`.
    """
    return tensor_offsets(tensors)[-1]


def layout_hash(tensors: Sequence[TensorSpec]) -> int:
    """xxh3-64 over order, names, dtypes and shapes. Equal hashes mean equal offsets."""
    hasher = xxhash.xxh3_64()
    for spec in tensors:
        for text in (spec.name, spec.dtype):
            encoded = text.encode()
            hasher.update(struct.pack("<I", len(encoded)) + encoded)
        hasher.update(struct.pack(f"<I{len(spec.shape)}Q", len(spec.shape), *spec.shape))
    return hasher.intdigest()
