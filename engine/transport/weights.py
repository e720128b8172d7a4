"""How learner ranks publish weights; `weight_subscriber.py` is the other end."""

import os
from collections.abc import Iterator
from pathlib import Path

import grpc

from headrace.engine.errors import StorageError
from headrace.engine.transport.channel import FRAME_BYTES, open_blocking_channel
from headrace.engine.transport.status import error_from_rpc
from headrace.engine.transport.weights_convert import manifest_to_proto
from headrace.engine.types import WeightManifest, WeightPart, WeightUpdate
from headrace.v1 import weights_pb2 as pb
from headrace.v1 import weights_pb2_grpc

PUBLISH_TIMEOUT_S = 600.0


class WeightPublisher:
    """One learner rank's line to the weight chain; blocking."""

    def __init__(self, address: str, *, rank: int, num_ranks: int, fencing_token: int) -> None:
        self._channel = open_blocking_channel(address)
        self._stub = weights_pb2_grpc.WeightServiceStub(self._channel)
        self._rank = rank
        self._num_ranks = num_ranks
        self._token = fencing_token
        self._deltas = False

    @property
    def takes_deltas(self) -> bool:
        """Whether all receivers took deltas when the hub last answered; where not, publish in full."""
        return self._deltas

    def publish(self, part: WeightUpdate, *, same_host: bool = True) -> bool:
        """Offer this rank's part of a version; blocks until the hub has it. True when that sealed the version.

        Args:
            part: The rank's manifest and the file that holds its bytes.
            same_host: The hub shares our file system, so the file's path is enough; else the bytes are streamed.

        Raises:
            FencedError: A successor has taken over.
            WrongBaseError: A delta's base is not the newest version that the hub has; publish in full.
            CorruptUpdateError: The parts of the ranks do not fit together.
        """
        try:
            reply = self._stub.Publish(self._messages(part, same_host), timeout=PUBLISH_TIMEOUT_S)
        except grpc.RpcError as error:
            raise error_from_rpc(error, f"publishing weights {part.manifest.version}") from error
        self._deltas = reply.deltas
        return reply.sealed

    def close(self) -> None:
        """Close the channel. May be called twice."""
        self._channel.close()

    def _messages(self, part: WeightUpdate, same_host: bool) -> Iterator[pb.PublishRequest]:
        header = pb.PublishHeader(
            rank=self._rank,
            num_ranks=self._num_ranks,
            fencing_token=self._token,
            manifest=manifest_to_proto(part.manifest),
            local_path=part.local_path if same_host else "",
        )
        if isinstance(part, WeightPart):
            header.num_changed, header.encode_s = part.num_changed, part.encode_s
        yield pb.PublishRequest(header=header)
        if not same_host:
            for offset, data in _pieces(Path(part.local_path), part.manifest):
                yield pb.PublishRequest(chunk=pb.WeightChunk(offset=offset, data=data))


def _pieces(path: Path, manifest: WeightManifest) -> Iterator[tuple[int, bytes]]:
    """The bytes of a part's buckets in pieces of a frame."""
    with path.open("rb") as file:
        for bucket in manifest.buckets:
            end = bucket.payload_offset + bucket.payload_bytes
            for offset in range(bucket.payload_offset, end, FRAME_BYTES):
                file.seek(offset)
                yield offset, file.read(min(FRAME_BYTES, end - offset))


def write_at(descriptor: int, data: bytes, offset: int, path: Path) -> None:
    """Write all of `data`; blocks.

    Raises:
        StorageError: The disk is full or broken.
    """
    view = memoryview(data)
    while view:
        try:
            written = os.pwrite(descriptor, view, offset)
        except OSError as error:
            raise StorageError(f"cannot write weights to {path}: {error.strerror}") from error
        view, offset = view[written:], offset + written
