"""The sending end of the weight chain on one rank: what was published last, and the next update against it.

    consumes    the rank's shards, cast to the published dtype, one set a version
    produces    its part of a keyframe, or of a delta against the version before, in a file

Invariants:

1. The *image* is the rank's shards as they were published last, with the digest of each bucket. It moves when the hub
   has accepted the part, and not before: a refused part leaves the image, and the next update is full. It is let go
   while the next update is going to be full anyway.
2. At most one update is open. The shards that it was staged with are the sender's own until it is settled; then they
   are the new image, or nothing.
3. Shards are cut into buckets at their own borders, so base and new state are cut alike. Every element of a shard is in
   one bucket of every part.
4. What is published are the given bits. A delta applied to the image gives the keyframe of the same version.

The arrays may lie on any device: `Bits` finds what changed where they are.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from headrace.engine.errors import StorageError
from headrace.engine.types import PolicyVersion, TensorSpec, WeightPart
from headrace.engine.weights.buckets import DeltaPart, cut_range
from headrace.engine.weights.delta import dense_bucket, pack_planes
from headrace.engine.weights.digest import DIGEST_MODULUS, state_digest
from headrace.engine.weights.keyframe import KeyframeWriter
from headrace.engine.weights.keyframe_policy import KeyframePolicy
from headrace.engine.weights.placement import open_reserved
from headrace.engine.weights.planes import BucketPlanes, diff_bucket
from headrace.engine.weights.ulp import RawArray

# Float32 elements that change take about three bytes each, and much longer to find and compress than to send.
_SAMPLED_ONE_IN = 997
_DENSE_ABOVE = 0.5

# A flat array that can be cut: numpy's, or a tensor.
Array = TypeVar("Array", bound=Any)
ReadArray = TypeVar("ReadArray", bound=Any, contravariant=True)


class Bits(Protocol[ReadArray]):
    """What the sender needs of arrays on some device. Both block until the device is done."""

    def diff(self, base: ReadArray, new: ReadArray, *, name_id: int, start: int) -> BucketPlanes:
        """The planes of a bucket, as `planes.diff_bucket`."""
        ...

    def on_host(self, array: ReadArray) -> RawArray:
        """The elements' bits in the host's memory, flat, uint16 or uint32."""
        ...


class HostBits:
    """For arrays that are bits in the host's memory already."""

    def diff(self, base: RawArray, new: RawArray, *, name_id: int, start: int) -> BucketPlanes:
        """See `Bits`."""
        return diff_bucket(base, new, name_id=name_id, start=start)

    def on_host(self, array: RawArray) -> RawArray:
        """See `Bits`."""
        return array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard(Generic[Array]):
    """A rank's share of one tensor.

    Attributes:
        tensor_index: The tensor's place in the layout.
        runs: Where the elements lie in the flattened tensor: (first element, number of elements), in the order of
            `elements`; none overlap. One run where the tensor is cut along its first dimension, more where it is cut
            along others or twice.
        elements: Flat, in the published dtype, shape [sum of the runs' numbers].
    """

    tensor_index: int
    runs: tuple[tuple[int, int], ...]
    elements: Array

    def buckets(self) -> "list[tuple[int, int, int]]":
        """Each bucket's first element in the flattened tensor, in `elements`, and its number of elements."""
        found: list[tuple[int, int, int]] = []
        local = 0
        for begin, num in self.runs:
            for start, count in cut_range(begin, begin + num):
                found.append((start, local + start - begin, count))
            local += num
        return found


class WeightSender(Generic[Array]):
    """Makes one rank's parts, one version after the other. For one thread at a time.

    Args:
        tensors: The layout; of all ranks, whatever this one holds of it.
        run_id: Stands in every manifest.
        rank: Its own delta files are named by it.
        keyframe_steps: See `KeyframePolicy`.
        bits: How to read the arrays.
        clock: Seconds, for `encode_s`.
    """

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        *,
        run_id: str,
        rank: int,
        keyframe_steps: int,
        bits: Bits[Array],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tensors = tuple(tensors)
        self.run_id = run_id
        self.rank = rank
        self.bits = bits
        self.clock = clock
        self._policy = KeyframePolicy(keyframe_steps)
        self._image: dict[int, Shard[Array]] = {}
        self._digests: dict[tuple[int, int], int] = {}
        self._open: StagedPart[Array] | None = None

    def needs_keyframe(self, version: PolicyVersion, since: PolicyVersion | None) -> bool:
        """Whether the update to `version` must be full; `since` is the newest version that the caller saw accepted.

        An update that is still open is settled by this: `since` tells whether it was accepted.
        """
        if self._open is not None:
            self._open.settle(accepted=self._open.version == since)
        return self._policy.needs_keyframe(version, since)

    def stage(self, version: PolicyVersion, shards: Sequence[Shard[Array]], *, full: bool) -> "StagedPart[Array]":
        """Open the update to `version`. Reads nothing yet.

        Args:
            version: What it leads to.
            shards: The state, cut as in the updates before; the sender's own from now on, and not to be written.
            full: Whether it is to be a keyframe; must be true where `needs_keyframe` says so.
        """
        assert self._open is None, "settle the update before, or ask needs_keyframe, which does so"
        assert full or not self._policy.needs_keyframe(version, self._policy.base), "there is no base for a delta"
        self._open = StagedPart(self, version, shards, base=None if full else self._policy.base)
        return self._open

    def base_of(self, shard: Shard[Array]) -> Shard[Array]:
        """The same shard as it was published last."""
        image = self._image[shard.tensor_index]
        assert image.runs == shard.runs, "a tensor is cut as in the updates before"
        return image

    def digest_of(self, tensor_index: int, start: int) -> int:
        """The digest of a bucket of the image."""
        return self._digests[tensor_index, start]

    def reset(self) -> None:
        """Forget what was published, as after a restart from other weights: the next update is full."""
        self._open = None
        self._policy.refused()
        self._image.clear()
        self._digests.clear()

    def closed(self, part: "StagedPart[Array]", written: WeightPart | None, shards: Sequence[Shard[Array]]) -> None:
        """Take the outcome of the open update; `written` is what was accepted, or None."""
        if part is not self._open:
            return
        self._open = None
        if written is None:
            self._policy.refused()
            return
        manifest = written.manifest
        num_bytes = sum(bucket.payload_bytes for bucket in manifest.buckets)
        self._policy.accepted(manifest.version, full=manifest.base is None, num_bytes=num_bytes)
        if not self._policy.may_send_delta:
            self._image.clear()
            self._digests.clear()
            return
        self._image = {shard.tensor_index: shard for shard in shards}
        self._digests = {(b.tensor_index, b.start): b.state_checksum for b in manifest.buckets}


class StagedPart(Generic[Array]):
    """One version, copied and not sent yet. Made by `WeightSender.stage`; may be written in another thread."""

    def __init__(
        self,
        sender: WeightSender[Array],
        version: PolicyVersion,
        shards: Sequence[Shard[Array]],
        *,
        base: PolicyVersion | None,
    ) -> None:
        self.version = version
        self._sender = sender
        self._shards = tuple(shard for shard in shards if shard.runs)
        self._base = base
        self._written: WeightPart | None = None

    def write(self, payload_dir: Path, *, full: bool = False) -> WeightPart:
        """Encode this rank's part and write it into a file. Blocks; may be repeated, with another folder.

        Args:
            payload_dir: Where the file goes; the ranks of a keyframe share one.
            full: Write a keyframe whatever was staged, because the delta was refused for its base.

        Raises:
            StorageError: There is no room in `payload_dir`.
        """
        begin_s = self._sender.clock()
        self._written = None
        if full or self._base is None:
            self._written = self._write_keyframe(payload_dir, begin_s)
        else:
            self._written = self._write_delta(payload_dir, self._base, begin_s)
        return self._written

    def settle(self, *, accepted: bool) -> None:
        """Say what became of what was written last. Only the first call counts.

        Args:
            accepted: The hub has it, and a later delta may start from it. False also where that is not known.
        """
        self._sender.closed(self, self._written if accepted else None, self._shards)
        self._shards = ()

    def _write_keyframe(self, payload_dir: Path, begin_s: float) -> WeightPart:
        sender = self._sender
        path = payload_dir / f"keyframe-{self.version.incarnation}-{self.version.version}.bin"
        with KeyframeWriter(path, sender.tensors, run_id=sender.run_id, version=self.version) as writer:
            for shard in self._shards:
                raw = sender.bits.on_host(shard.elements)
                for start, local, count in shard.buckets():
                    writer.write(shard.tensor_index, start, raw[local : local + count])
            manifest = writer.manifest()
        return WeightPart(manifest=manifest, local_path=str(path), encode_s=sender.clock() - begin_s)

    def _write_delta(self, payload_dir: Path, base: PolicyVersion, begin_s: float) -> WeightPart:
        sender = self._sender
        part = DeltaPart(sender.tensors, run_id=sender.run_id, version=self.version, base=base)
        changed = sum(self._add_shard(part, shard) for shard in self._shards)
        manifest = part.manifest()
        name = f"delta-{self.version.incarnation}-{self.version.version}-{base.version}-rank{sender.rank}.bin"
        path = payload_dir / name
        _write_file(path, part.payloads(), manifest.payload_bytes)
        return WeightPart(
            manifest=manifest, local_path=str(path), num_changed=changed, encode_s=sender.clock() - begin_s
        )

    def _add_shard(self, part: DeltaPart, shard: Shard[Array]) -> int:
        """Encode the buckets of a shard; returns the number of changed elements."""
        sender, index = self._sender, shard.tensor_index
        old, changed = sender.base_of(shard).elements, 0
        for start, local, count in shard.buckets():
            new = shard.elements[local : local + count]
            share = self._sampled_change(old[local : local + count : _SAMPLED_ONE_IN], new[::_SAMPLED_ONE_IN])
            if share > _DENSE_ABOVE:
                raw = sender.bits.on_host(new)
                part.add(index, start, dense_bucket(raw), state_digest(index, start, raw))
                changed += round(share * count)
                continue
            planes = sender.bits.diff(old[local : local + count], new, name_id=index, start=start)
            encoded = pack_planes(planes, partial(sender.bits.on_host, new))
            digest = (sender.digest_of(index, start) + planes.digest_change) % DIGEST_MODULUS
            part.add(index, start, encoded, digest)
            changed += len(planes.values)
        return changed

    def _sampled_change(self, old: Array, new: Array) -> float:
        """The share of changed elements among some of a bucket; 0 for 16-bit elements, whose steps are always small."""
        before, after = self._sender.bits.on_host(old), self._sender.bits.on_host(new)
        return 0.0 if before.itemsize == 2 else np.count_nonzero(before != after) / max(1, len(before))


def _write_file(path: Path, pieces: Sequence[bytes | memoryview], size: int) -> None:
    path.unlink(missing_ok=True)  # of an attempt that failed
    descriptor = open_reserved(path, size)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for piece in pieces:
                file.write(piece)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StorageError(f"writing {size} bytes to {path} failed: {error.strerror}") from error
