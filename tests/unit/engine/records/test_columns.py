"""Sidecar columns and the schema that says which a table takes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.engine.errors import FormatError, InputError, SchemaError
from headrace.engine.records import DEFAULT_SCHEMA, ColumnSpec, decode_column, encode_column

_DTYPES = ["int32", "int64", "uint8", "float32", "float64"]


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(_DTYPES).flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, min_side=0))))
def test_any_column_comes_back_with_name_dtype_shape_and_values(array: Any) -> None:
    encoded = encode_column("values", array)
    name, decoded = decode_column(encoded)
    assert name == "values"
    assert (decoded.dtype, decoded.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(decoded, array)
    assert not decoded.flags.writeable
    assert len(encoded) % 8 == 0


@pytest.mark.parametrize("dtype", ["float16", "bool", "complex64", "object", "S4", ">f4", "datetime64[s]"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(SchemaError, match="records hold int32"):
        encode_column("values", np.zeros(2, dtype))


def test_a_truncated_column_is_a_format_error_at_every_byte() -> None:
    encoded = encode_column("reward", np.array(1.5))
    for length in range(len(encoded)):
        with pytest.raises(FormatError):
            decode_column(encoded[:length])


def test_a_writable_buffer_is_refused_unless_copied() -> None:
    buffer = bytearray(encode_column("reward", np.array(1.5)))
    with pytest.raises(InputError, match="writable"):
        decode_column(buffer)
    _, reward = decode_column(buffer, copy=True)
    buffer[:] = bytes(len(buffer))
    assert reward == 1.5


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("reward", np.array(1.0)),
        ("advantage", np.array(0.5, np.float32)),
        ("reference_logprobs", np.zeros(4, np.float32)),
        ("proximal_logprobs", np.zeros(4, np.float32)),
        ("values", np.zeros(4, np.float32)),
    ],
)
def test_the_known_columns_are_accepted_in_their_form_alone(name: str, array: Any) -> None:
    DEFAULT_SCHEMA.check(name, array, 4)
    with pytest.raises(SchemaError, match="has dtype int32"):
        DEFAULT_SCHEMA.check(name, array.astype(np.int32), 4)
    with pytest.raises(SchemaError, match="has shape"):
        DEFAULT_SCHEMA.check(name, np.zeros(5, array.dtype), 4)


def test_an_unknown_column_is_refused_with_the_known_names() -> None:
    with pytest.raises(SchemaError, match=r"'rewrad' is unknown; the table has reward, advantage"):
        DEFAULT_SCHEMA.check("rewrad", np.array(1.0), 4)


def test_a_stage_declares_its_own_column_once() -> None:
    teacher = ColumnSpec("teacher_logprobs", "float32", "tokens")
    schema = DEFAULT_SCHEMA.extended(teacher).extended(teacher)
    schema.check("teacher_logprobs", np.zeros(3, np.float32), 3)
    with pytest.raises(SchemaError, match="already declared"):
        schema.extended(ColumnSpec("reward", "float32", "scalar"))
