"""Weight updates: layout, buckets, manifest, acknowledgement."""

import enum

import msgspec

from headrace.engine.types.policy import PolicyVersion


class UpdateKind(enum.IntEnum):
    """The numbers are those of the wire."""

    KEYFRAME = 1
    DELTA = 2


class BucketEncoding(enum.IntEnum):
    """How a bucket's elements are written; the numbers are those of the wire."""

    DENSE = 1
    SAME = 2
    GAP_VALUE = 3
    GAP_ULP = 4


class AckStatus(enum.IntEnum):
    """What became of an update at a receiver; the numbers are those of the wire."""

    SERVING = 1
    WRONG_BASE = 2
    UNKNOWN_LAYOUT = 3
    CORRUPT = 4
    FAILED = 5


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the checkpoint under its canonical name; dtype is "bfloat16", "float16" or "float32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class WeightBucket(msgspec.Struct, frozen=True, kw_only=True):
    """Elements [start, start + count) of one flattened tensor, and where their payload lies (`docs/weight-format.md`).

    Attributes:
        payload_checksum: xxh3-64 of the payload bytes.
        state_checksum: The digest of the elements after the update (`weights/digest.py`).
    """

    tensor_index: int
    start: int
    count: int
    encoding: BucketEncoding
    payload_offset: int
    payload_bytes: int
    payload_checksum: int
    state_checksum: int


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an update is made of. `digest` is the sum of the buckets' state checksums modulo 2**64."""

    run_id: str
    version: PolicyVersion
    base: PolicyVersion | None
    kind: UpdateKind
    layout_hash: int
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[WeightBucket, ...]
    payload_bytes: int
    digest: int


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed update whose payload lies in a file of this host (usually shared memory)."""

    manifest: WeightManifest
    local_path: str


class WeightPart(WeightUpdate, frozen=True, kw_only=True):
    """One rank's part of an update, as its sender hands it on.

    Attributes:
        num_changed: Elements of the part that differ from the base; 0 in a keyframe.
        encode_s: How long it took to find, encode and write them.
    """

    num_changed: int = 0
    encode_s: float = 0.0


class WeightAck(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver's answer to an update.

    Attributes:
        version: What the receiver serves now, whatever became of the update.
        digest: Of the state it serves; 0 where it has applied no update yet, or a failed one has left no whole state.
        pause_s: How long generation stood still.
        fetch_s: How long the payload took to arrive; 0 where it lay on the host already.
    """

    version: PolicyVersion
    status: AckStatus
    digest: int = 0
    message: str = ""
    pause_s: float = 0.0
    apply_s: float = 0.0
    fetch_s: float = 0.0
