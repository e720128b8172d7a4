"""Writing full weight updates: several ranks, one file.

Invariants:
- The file's size and every offset follow from the layout alone (`layout.py`); a rank writes only its own ranges.
- A bucket covers at most `BUCKET_ELEMENTS` elements of one tensor and never crosses a multiple of that number, so
  the cut does not depend on how a tensor was handed over, except at the borders of the pieces.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import xxhash

from headrace.engine.errors import InputError, StorageError
from headrace.engine.types import (
    BucketEncoding,
    PolicyVersion,
    TensorSpec,
    UpdateKind,
    WeightBucket,
    WeightManifest,
)
from headrace.engine.weights.buckets import cut_range
from headrace.engine.weights.digest import DIGEST_MODULUS, state_digest
from headrace.engine.weights.layout import (
    element_bytes,
    layout_hash,
    num_elements,
    raw_dtype,
    tensor_offsets,
)
from headrace.engine.weights.placement import open_reserved


class KeyframeWriter:
    """Writes one rank's ranges of a full update into a file that all ranks of a host share.

    Opening creates the file or joins the one that is there; its whole size is reserved at once, so that a full disk
    shows here and not as a bus error later. The file stays after `close`; whoever publishes it removes it.

    Raises:
        FormatError: A tensor's dtype or shape is not allowed.
        StorageError: There is no room, the folder is not writable, or the path holds a file of another size.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorSpec], *, run_id: str, version: PolicyVersion) -> None:
        self._tensors = tuple(tensors)
        self._offsets = tensor_offsets(self._tensors)
        self._run_id = run_id
        self._version = version
        self._buckets: list[WeightBucket] = []
        self._written: dict[int, list[tuple[int, int]]] = {}
        self._fd = open_reserved(path, self._offsets[-1])
        self._path = path

    def __enter__(self) -> "KeyframeWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The file that is written."""
        return self._path

    def write(
        self, tensor_index: int, start: int, data: bytes | bytearray | memoryview | npt.NDArray[np.generic]
    ) -> None:
        """Write elements [start, start + len) of one flattened tensor. Blocks for the copy.

        Args:
            tensor_index: Position of the tensor in the layout.
            start: First element.
            data: C-contiguous little-endian elements of the tensor's dtype. Empty is allowed and does nothing.

        Raises:
            InputError: The range is outside the tensor, overlaps an earlier one, or is no whole number of elements.
            StorageError: The file cannot be written.
        """
        if not 0 <= tensor_index < len(self._tensors):
            raise InputError(f"Tensor {tensor_index} was given; the layout has tensors 0 to {len(self._tensors) - 1}.")
        spec = self._tensors[tensor_index]
        size = element_bytes(spec)
        raw = data.data if isinstance(data, np.ndarray) else memoryview(data)
        if raw.nbytes == 0:
            return
        raw = raw.cast("B")
        if raw.nbytes % size:
            raise InputError(f"{raw.nbytes} bytes were given for {spec.name!r}; a whole number of {size} is needed.")
        end = start + raw.nbytes // size
        self._claim_range(tensor_index, spec, start, end)
        for first, count in cut_range(start, end):
            piece = raw[(first - start) * size : (first - start + count) * size]
            offset = self._offsets[tensor_index] + first * size
            self._write_bytes(offset, piece)
            self._buckets.append(
                WeightBucket(
                    tensor_index=tensor_index,
                    start=first,
                    count=count,
                    encoding=BucketEncoding.DENSE,
                    payload_offset=offset,
                    payload_bytes=piece.nbytes,
                    payload_checksum=xxhash.xxh3_64_intdigest(piece),
                    state_checksum=state_digest(tensor_index, first, np.frombuffer(piece, raw_dtype(spec.dtype))),
                )
            )

    def manifest(self) -> WeightManifest:
        """This rank's part: its buckets in layout order, and their digest. `merge_manifests` joins the parts."""
        buckets = tuple(sorted(self._buckets, key=lambda b: (b.tensor_index, b.start)))
        return WeightManifest(
            run_id=self._run_id,
            version=self._version,
            base=None,
            kind=UpdateKind.KEYFRAME,
            layout_hash=layout_hash(self._tensors),
            tensors=self._tensors,
            buckets=buckets,
            payload_bytes=self._offsets[-1],
            digest=sum(b.state_checksum for b in buckets) % DIGEST_MODULUS,
        )

    def close(self) -> None:
        """Close the file and leave it in place. May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _claim_range(self, tensor_index: int, spec: TensorSpec, start: int, end: int) -> None:
        count = num_elements(spec)
        if start < 0 or end > count:
            raise InputError(f"Elements {start} to {end} of {spec.name!r} were given; it has {count}.")
        ranges = self._written.setdefault(tensor_index, [])
        if any(start < other_end and other_start < end for other_start, other_end in ranges):
            raise InputError(f"Elements {start} to {end} of {spec.name!r} overlap a range written before.")
        ranges.append((start, end))

    def _write_bytes(self, offset: int, data: memoryview) -> None:
        while data:
            try:
                written = os.pwrite(self._fd, data, offset)
            except OSError as error:
                raise StorageError(f"Writing {data.nbytes} bytes to {self._path} failed: {error.strerror}.") from error
            data = data[written:]
            offset += written
