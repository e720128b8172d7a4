"""The one record format: trajectories and sidecar columns as bytes. See docs/record-format.md."""

from headrace.engine.records.columns import decode_column, encode_column
from headrace.engine.records.header import header_of, peek_header
from headrace.engine.records.schema import DEFAULT_SCHEMA, ColumnSpec, TableSchema
from headrace.engine.records.trajectory import decode_trajectory, encode_trajectory

__all__ = [
    "DEFAULT_SCHEMA",
    "ColumnSpec",
    "TableSchema",
    "decode_column",
    "decode_trajectory",
    "encode_column",
    "encode_trajectory",
    "header_of",
    "peek_header",
]
