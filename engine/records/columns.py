"""Sidecar columns as bytes: what is learnt of a record after it was made, one column a frame, never a rewrite of it."""

from typing import Any

import msgspec
import numpy.typing as npt

from headrace.engine.errors import FormatError
from headrace.engine.records.body import decode_body, encode_body
from headrace.engine.records.frame import KIND_COLUMN, ArrayEntry, Buffer, array_entry, locate, open_frame, pack, view


class ColumnBody(msgspec.Struct, frozen=True):
    """The msgpack body of a column; its table has one row of the same name."""

    name: str
    arrays: tuple[ArrayEntry, ...]


_decoder = msgspec.msgpack.Decoder(ColumnBody)


def encode_column(name: str, array: npt.NDArray[Any]) -> bytes:
    """Encode one column of one record: shape [] for a scalar, [T] for one value a response token.

    Whether a table takes the column is `TableSchema.check`'s business.

    Raises:
        SchemaError: The dtype is not one of the five that records hold.
    """
    body = ColumnBody(name=name, arrays=(array_entry(name, array),))
    return pack(KIND_COLUMN, encode_body(body), (array,))


def decode_column(data: Buffer, *, copy: bool = False) -> tuple[str, npt.NDArray[Any]]:
    """Decode a column into its name and a read-only view of `data`; see `decode_trajectory` for what that promises.

    Raises:
        InputError: `data` is writable and `copy` is false.
        FormatError: The bytes are not one whole, undamaged column of this major version.
    """
    frame = open_frame(data, KIND_COLUMN, copy=copy)
    body = decode_body(_decoder, frame)
    place = locate(frame, body.arrays).get(body.name)
    if place is None:
        raise FormatError(f"column {body.name[:80]!r} has no array of its name")
    return body.name, view(frame, *place)
