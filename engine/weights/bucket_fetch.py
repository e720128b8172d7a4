"""Which buckets of an update have arrived whole, whatever happens to the frames on their way: a pure state machine.

Invariants:

1. A bucket has arrived once its frames came one after the other, and the bytes have the checksum of the manifest. What
   has arrived stays; it is not asked for again.
2. A bucket with a lost, late, repeated or damaged frame is as if nothing of it had come: it is asked for again, whole.
3. No byte goes anywhere but into its own bucket's place.
"""

from dataclasses import dataclass, field

import xxhash

from headrace.engine.errors import CorruptUpdateError
from headrace.engine.types import WeightManifest


@dataclass(slots=True)
class _Begun:
    """A bucket of which something has come: up to `next`, an offset in the payload."""

    next: int
    hash: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)


class BucketFetch:
    """The buckets of one update."""

    def __init__(self, manifest: WeightManifest) -> None:
        """All are missing, but for those without bytes.

        Raises:
            CorruptUpdateError: A bucket lies outside the payload.
        """
        self._manifest = manifest
        self._begun: dict[int, _Begun] = {}
        self._missing: dict[int, None] = {}
        for index, bucket in enumerate(manifest.buckets):
            end = bucket.payload_offset + bucket.payload_bytes
            if bucket.payload_offset < 0 or bucket.payload_bytes < 0 or end > manifest.payload_bytes:
                raise CorruptUpdateError(
                    f"a bucket of weights {manifest.version} ends at byte {end} of {manifest.payload_bytes}; the "
                    "update is refused"
                )
            if bucket.payload_bytes:
                self._missing[index] = None

    def missing(self) -> tuple[int, ...]:
        """Indices of the buckets to ask for, in order; those that have begun begin anew."""
        self._begun.clear()
        return tuple(self._missing)

    def take(self, index: int, offset: int, data: bytes) -> bool:
        """Take a frame.

        Args:
            index: The bucket that it belongs to.
            offset: Where its first byte lies in the payload.
            data: Its bytes.

        Returns:
            Whether the bytes belong into the payload's file. False for a frame that comes twice or too late.

        Raises:
            CorruptUpdateError: The frame lies outside its bucket.
        """
        buckets = self._manifest.buckets
        if not 0 <= index < len(buckets):
            raise self._outside(index, offset, data)
        bucket = buckets[index]
        end = bucket.payload_offset + bucket.payload_bytes
        if offset < bucket.payload_offset or offset + len(data) > end:
            raise self._outside(index, offset, data)
        if index not in self._missing:
            return False
        begun = self._begun.setdefault(index, _Begun(bucket.payload_offset))
        if offset != begun.next:
            del self._begun[index]
            return False
        begun.hash.update(data)
        begun.next += len(data)
        if begun.next == end:
            del self._begun[index]
            if begun.hash.intdigest() == bucket.payload_checksum:
                del self._missing[index]
        return True

    def _outside(self, index: int, offset: int, data: bytes) -> CorruptUpdateError:
        return CorruptUpdateError(
            f"a piece of weights {self._manifest.version} covers bytes {offset} to {offset + len(data)}, outside of "
            f"bucket {index}; the update is refused"
        )
