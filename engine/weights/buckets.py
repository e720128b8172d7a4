"""How a state is cut into buckets, and one rank's part of a delta put together from them.

Invariants:

1. A bucket covers at most `BUCKET_ELEMENTS` elements of one tensor, and crosses neither a multiple of that number nor
   the border of a shard. So the cut of a shard follows from its range alone, and base and new state are cut alike.
2. A part lists every bucket of the rank's shards, also those that are the same; their payloads lie end to end in
   the order in which they were added. `merge_manifests` joins the parts of all ranks.
3. The state checksums of a part are those of the new state, whatever the encoding; their sum is the digest.
"""

from collections.abc import Iterator, Sequence

from headrace.engine.errors import InputError
from headrace.engine.types import PolicyVersion, TensorSpec, UpdateKind, WeightBucket, WeightManifest
from headrace.engine.weights.delta import EncodedBucket
from headrace.engine.weights.layout import BUCKET_ELEMENTS, layout_hash, num_elements
from headrace.engine.weights.manifest import digest_of


def cut_range(start: int, end: int) -> Iterator[tuple[int, int]]:
    """The buckets (first element, number of elements) of the shard [start, end) of a flattened tensor, in order."""
    while start < end:
        border = min(end, (start // BUCKET_ELEMENTS + 1) * BUCKET_ELEMENTS)
        yield start, border - start
        start = border


class DeltaPart:
    """Collects one rank's encoded buckets; holds their payloads in memory, so its size grows with what changed.

    Args:
        tensors: The layout.
        run_id: As in every part of the update.
        version: What the update leads to.
        base: What it starts from.
    """

    def __init__(
        self, tensors: Sequence[TensorSpec], *, run_id: str, version: PolicyVersion, base: PolicyVersion
    ) -> None:
        self._tensors = tuple(tensors)
        self._run_id = run_id
        self._version = version
        self._base = base
        self._buckets: list[WeightBucket] = []
        self._payloads: list[bytes | memoryview] = []
        self._payload_bytes = 0

    def add(self, tensor_index: int, start: int, encoded: EncodedBucket, state_checksum: int) -> None:
        """Take a bucket.

        Args:
            tensor_index: Position of the tensor in the layout.
            start: The bucket's first element in the flattened tensor.
            encoded: From `encode_bucket` or `pack_planes`.
            state_checksum: The digest of the bucket's new state: that of its base and the planes' `digest_change`.

        Raises:
            InputError: The bucket lies outside its tensor, or crosses a border of buckets.
        """
        if not 0 <= tensor_index < len(self._tensors):
            raise InputError(f"tensor {tensor_index} was given; the layout has tensors 0 to {len(self._tensors) - 1}")
        spec = self._tensors[tensor_index]
        end = start + encoded.count
        if not 0 <= start < end <= num_elements(spec) or list(cut_range(start, end)) != [(start, encoded.count)]:
            raise InputError(
                f"elements {start} to {end} of {spec.name!r} with {num_elements(spec)} elements are no bucket; cut the "
                "shard with cut_range"
            )
        self._buckets.append(
            encoded.described(
                tensor_index=tensor_index,
                start=start,
                payload_offset=self._payload_bytes,
                state_checksum=state_checksum,
            )
        )
        if len(encoded.payload):
            self._payloads.append(encoded.payload)
            self._payload_bytes += len(encoded.payload)

    def payloads(self) -> list[bytes | memoryview]:
        """The pieces of the part's payload, to be written end to end. Copies nothing."""
        return list(self._payloads)

    def manifest(self) -> WeightManifest:
        """The part as `merge_manifests` and `VersionChain.offer_part` take it."""
        buckets = tuple(sorted(self._buckets, key=lambda bucket: (bucket.tensor_index, bucket.start)))
        return WeightManifest(
            run_id=self._run_id,
            version=self._version,
            base=self._base,
            kind=UpdateKind.DELTA,
            layout_hash=layout_hash(self._tensors),
            tensors=self._tensors,
            buckets=buckets,
            payload_bytes=self._payload_bytes,
            digest=digest_of(buckets),
        )
