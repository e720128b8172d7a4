"""Bytes that another writer, a later version, a broken disk or an enemy made. The frames here are built from
docs/record-format.md alone, not with the codec."""

import pickle
import struct
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import FormatError
from headrace.engine.records import decode_column, decode_trajectory, encode_column, encode_trajectory, peek_header
from headrace.engine.testing.samples import assert_same_trajectory, make_trajectory

_GOOD = encode_trajectory(make_trajectory())


def _frame(
    body: dict[str, Any] | bytes,
    arrays: Sequence[bytes] = (),
    *,
    magic: bytes = b"HDRC",
    version: int = 1,
    kind: int = 1,
    flags: int = 0,
) -> bytes:
    packed = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    rest = packed + bytes(-len(packed) % 8)
    for array in arrays:
        rest += array + bytes(-len(array) % 8)
    checked = struct.pack("<IQ", len(packed), 24 + len(rest)) + rest
    return struct.pack("<4sBBHI", magic, version, kind, flags, google_crc32c.value(checked)) + checked


def _parts() -> tuple[dict[str, Any], list[bytes]]:
    (length,) = struct.unpack_from("<I", _GOOD, 12)
    t = make_trajectory()
    arrays = [a.tobytes() for a in (t.prompt_token_ids, t.response_token_ids, t.logprobs, t.loss_mask)]
    return msgspec.msgpack.decode(_GOOD[24 : 24 + length]), arrays


def _refused(data: bytes) -> None:
    for read in (decode_trajectory, peek_header, decode_column):
        with pytest.raises(FormatError):
            read(data)


def test_a_frame_built_from_the_specification_is_the_encoders_own() -> None:
    body, arrays = _parts()
    assert _frame(body, arrays) == _GOOD


def test_unknown_body_keys_and_arrays_are_ignored() -> None:
    body, arrays = _parts()
    body["colour"] = {"deep": [1, {"deeper": None}]}
    body["arrays"] = [["routing", "complex512", [3, 3], 5, "extra"], *body["arrays"]]
    later = _frame(body, [b"12345", *arrays])
    assert_same_trajectory(decode_trajectory(later), make_trajectory())
    assert peek_header(later) == peek_header(_GOOD)


def test_missing_optional_keys_have_defaults() -> None:
    body, arrays = _parts()
    for key in ("prompt_text", "response_text", "data_json", "started_at_s", "finished_at_s"):
        del body[key]
    expected = make_trajectory(prompt_text="", response_text="", data={}, started_at_s=0.0, finished_at_s=0.0)
    assert_same_trajectory(decode_trajectory(_frame(body, arrays)), expected)


@pytest.mark.parametrize("change", [{"version": 2}, {"version": 0}, {"magic": b"PK\3\4"}, {"kind": 9}, {"flags": 1}])
def test_another_version_magic_kind_or_flag_is_refused(change: dict[str, Any]) -> None:
    body, arrays = _parts()
    _refused(_frame(body, arrays, **change))


def test_a_column_is_not_a_trajectory_nor_the_other_way_round() -> None:
    with pytest.raises(FormatError, match="kind 2"):
        decode_trajectory(encode_column("reward", np.array(1.0)))
    with pytest.raises(FormatError, match="kind 1"):
        decode_column(_GOOD)


def test_truncated_record_at_every_byte_is_a_format_error() -> None:
    for length in range(len(_GOOD)):
        _refused(_GOOD[:length])


def test_every_flipped_byte_is_a_format_error() -> None:
    for position in range(len(_GOOD)):
        damaged = bytearray(_GOOD)
        damaged[position] ^= 0x41
        _refused(bytes(damaged))


def test_no_pickle_a_marker_is_never_made(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (marker,))

    payload = pickle.dumps(Bomb())
    body, arrays = _parts()
    _refused(payload)
    _refused(_frame(payload))
    _refused(_frame({**body, "data_json": payload.decode("latin-1")}, [payload, *arrays]))
    body["arrays"][0][1] = "object"
    _refused(_frame(body, arrays))
    assert not marker.exists()


_HUGE = 0x3FFFFFFF
_BOMBS = {
    "announced array": b"\xdd" + struct.pack(">I", _HUGE),
    "announced map": b"\xdf" + struct.pack(">I", _HUGE),
    "announced bytes": b"\xc6" + struct.pack(">I", _HUGE),
    "announced text": b"\xdb" + struct.pack(">I", _HUGE),
    "announced extension": b"\xc9" + struct.pack(">I", _HUGE) + b"\1",
    "nested arrays": b"\x91" * 100_000 + b"\xc0",
    "nested maps": b"\x81\xa1a" * 100_000 + b"\xc0",
}


@pytest.mark.parametrize("place", ["body", "spans", "arrays", "unknown key", "data_json"])
@pytest.mark.parametrize("bomb", list(_BOMBS))
def test_header_bomb_is_refused_at_once_and_without_memory(bomb: str, place: str) -> None:
    body, arrays = _parts()
    if place == "body":
        packed = _BOMBS[bomb]
    else:
        key = "zz" if place == "unknown key" else place
        body.pop(key, None)
        packed = b"\xde" + struct.pack(">H", len(body) + 1) + bytes([0xA0 + len(key)]) + key.encode() + _BOMBS[bomb]
        packed += msgspec.msgpack.encode(body)[3:]
    data = _frame(packed, arrays)
    tracemalloc.start()
    begin = time.process_time()
    for read in (decode_trajectory, peek_header):
        with pytest.raises(FormatError):
            read(data)
    elapsed = time.process_time() - begin
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert elapsed < 0.2  # two reads, each within 100 ms of this process
    assert peak < 4 << 20


@pytest.mark.parametrize("shape", [[2147483647, 2147483647], [2**63 - 1], [2**64 - 1], [-4], [2.0], "4", [4, 0], [[1]]])
def test_header_bomb_a_shape_must_equal_the_bytes_that_are_there(shape: Any) -> None:
    body, arrays = _parts()
    body["arrays"][0] = ["prompt_token_ids", "int32", shape, len(arrays[0])]
    _refused(_frame(body, arrays))


def test_header_bomb_nested_json_data_is_refused() -> None:
    body, arrays = _parts()
    for text in ("[" * 100_000, '{"a":' * 100_000, '{"a":' + "[" * 40 + "]" * 40 + "}", "[]", "nul", ""):
        with pytest.raises(FormatError):
            decode_trajectory(_frame({**body, "data_json": text}, arrays))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("group_size", 0),
        ("sample_index", -1),
        ("attempt", 2**32),
        ("record_id", ""),
        ("record_id", b"\xff"),
        ("num_loss_tokens", 3),
        ("num_loss_tokens", 6),
        ("spans", []),
        ("spans", [[0, 3, 4]]),
        ("spans", [[0, 3]]),
        ("spans", [[0, 3, 2**63 - 1], [0, 3, 6]]),
        ("finish_reason", 0),
        ("finish_reason", 7),
        ("temperature", float("nan")),
        ("temperature", "warm"),
        ("arrays", []),
    ],
)
def test_a_field_out_of_its_range_is_refused(key: str, value: Any) -> None:
    body, arrays = _parts()
    with pytest.raises(FormatError):
        decode_trajectory(_frame({**body, key: value}, arrays))


def test_arrays_must_fill_the_frame_exactly_and_have_unique_names() -> None:
    body, arrays = _parts()
    _refused(_frame(body, [*arrays, bytes(8)]))
    _refused(_frame(body, arrays[:-1]))
    body["arrays"].append(body["arrays"][0])
    _refused(_frame(body, [*arrays, arrays[0]]))


def test_a_wrong_dtype_or_mask_inside_a_right_frame_is_refused() -> None:
    body, arrays = _parts()
    with pytest.raises(FormatError, match="other than 0 and 1"):
        decode_trajectory(_frame(body, [*arrays[:3], b"\1\1\1\2\0"]))
    body["arrays"][2][1] = "int32"
    with pytest.raises(FormatError, match="logprobs is int32"):
        decode_trajectory(_frame(body, arrays))


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_in_a_right_frame_are_refused(noise: bytes) -> None:
    _refused(noise)
    _refused(_frame(noise))


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_body_changed_under_a_right_checksum_never_crashes_a_reader(data: st.DataObject) -> None:
    body, arrays = _parts()
    packed = bytearray(msgspec.msgpack.encode(body))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    changed = _frame(bytes(packed), arrays)
    for read in (decode_trajectory, peek_header):
        try:
            read(changed)
        except FormatError:
            continue
