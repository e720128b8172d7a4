"""Conversions between the wire's weight messages and our own types.

Decoding checks what the types promise (known enumerations), not what a payload holds: `verify_payload` does that.
"""

import enum
from typing import TypeVar

from headrace.engine.errors import FormatError
from headrace.engine.transport.convert import version_from_proto, version_to_proto
from headrace.engine.types import (
    AckStatus,
    BucketEncoding,
    TensorSpec,
    UpdateKind,
    WeightAck,
    WeightBucket,
    WeightManifest,
    WeightUpdate,
)
from headrace.v1 import weights_pb2 as pb

_Enum = TypeVar("_Enum", bound=enum.IntEnum)


def _enum_value(kind: type[_Enum], value: int) -> _Enum:
    try:
        return kind(value)
    except ValueError:
        raise FormatError(
            f"{value} is not a {kind.__name__}; known are {', '.join(member.name for member in kind)}."
        ) from None


def manifest_to_proto(manifest: WeightManifest) -> pb.WeightManifest:
    return pb.WeightManifest(
        run_id=manifest.run_id,
        version=version_to_proto(manifest.version),
        base=version_to_proto(manifest.base) if manifest.base is not None else None,
        kind=pb.UpdateKind.ValueType(manifest.kind),
        layout_hash=manifest.layout_hash,
        tensors=[pb.TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape) for t in manifest.tensors],
        buckets=[_bucket_to_proto(bucket) for bucket in manifest.buckets],
        payload_bytes=manifest.payload_bytes,
        digest=manifest.digest,
    )


def manifest_from_proto(message: pb.WeightManifest) -> WeightManifest:
    """The manifest behind a message.

    Raises:
        FormatError: An enumeration has a value that is not known.
    """
    return WeightManifest(
        run_id=message.run_id,
        version=version_from_proto(message.version),
        base=version_from_proto(message.base) if message.HasField("base") else None,
        kind=_enum_value(UpdateKind, message.kind),
        layout_hash=message.layout_hash,
        tensors=tuple(TensorSpec(name=t.name, dtype=t.dtype, shape=tuple(t.shape)) for t in message.tensors),
        buckets=tuple(_bucket_from_proto(bucket) for bucket in message.buckets),
        payload_bytes=message.payload_bytes,
        digest=message.digest,
    )


def update_to_proto(update: WeightUpdate) -> pb.WeightUpdate:
    return pb.WeightUpdate(manifest=manifest_to_proto(update.manifest), local_path=update.local_path)


def update_from_proto(message: pb.WeightUpdate) -> WeightUpdate:
    """The update behind a message.

    Raises:
        FormatError: An enumeration has a value that is not known.
    """
    return WeightUpdate(manifest=manifest_from_proto(message.manifest), local_path=message.local_path)


def ack_to_proto(ack: WeightAck) -> pb.WeightAck:
    return pb.WeightAck(
        version=version_to_proto(ack.version),
        status=pb.AckStatus.ValueType(ack.status),
        digest=ack.digest,
        message=ack.message,
        pause_s=ack.pause_s,
        apply_s=ack.apply_s,
        fetch_s=ack.fetch_s,
    )


def ack_from_proto(message: pb.WeightAck) -> WeightAck:
    """The acknowledgement behind a message.

    Raises:
        FormatError: The status is not known.
    """
    return WeightAck(
        version=version_from_proto(message.version),
        status=_enum_value(AckStatus, message.status),
        digest=message.digest,
        message=message.message,
        pause_s=message.pause_s,
        apply_s=message.apply_s,
        fetch_s=message.fetch_s,
    )


def _bucket_to_proto(bucket: WeightBucket) -> pb.WeightBucket:
    return pb.WeightBucket(
        tensor_index=bucket.tensor_index,
        start=bucket.start,
        count=bucket.count,
        encoding=pb.BucketEncoding.ValueType(bucket.encoding),
        payload_offset=bucket.payload_offset,
        payload_bytes=bucket.payload_bytes,
        payload_checksum=bucket.payload_checksum,
        state_checksum=bucket.state_checksum,
    )


def _bucket_from_proto(message: pb.WeightBucket) -> WeightBucket:
    return WeightBucket(
        tensor_index=message.tensor_index,
        start=message.start,
        count=message.count,
        encoding=_enum_value(BucketEncoding, message.encoding),
        payload_offset=message.payload_offset,
        payload_bytes=message.payload_bytes,
        payload_checksum=message.payload_checksum,
        state_checksum=message.state_checksum,
    )
