"""The planes of a delta never change, before compression. The vectors are checked against the codec, and against a
second implementation that was written from docs/weight-format.md alone, one element at a time."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from headrace.engine.types import BucketEncoding
from headrace.engine.weights.delta import EncodedBucket, apply_change, decode_bucket
from headrace.engine.weights.digest import DIGEST_MODULUS, state_digest
from headrace.engine.weights.planes import diff_bucket
from headrace.engine.weights.ulp import RawArray

_FOLDER = Path(__file__).parents[3] / "golden" / "weights"
_RAW = {"bfloat16": np.dtype("<u2"), "float16": np.dtype("<u2"), "float32": np.dtype("<u4")}

Vector = dict[str, Any]


def _vectors() -> dict[str, Vector]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(_FOLDER.glob("*.json"))}


def _states(vector: Vector) -> tuple[RawArray, RawArray]:
    """Base and new state; the base is given by its first element and the step from each to the next."""
    raw = _RAW[vector["dtype"]]
    modulus = 1 << 8 * raw.itemsize
    base = [(vector["base_first"] + index * vector["base_step"]) % modulus for index in range(vector["count"])]
    new = list(base)
    for position, bits in vector["changes"]:
        new[position] = bits
    return np.array(base, raw), np.array(new, raw)


def _order(bits: int, width: int) -> int:
    return bits if bits < 1 << (width - 1) else -1 - (bits & ((1 << (width - 1)) - 1))


def plain_payloads(vector: Vector) -> dict[str, str]:
    """Both payloads with their planes as they are, in hexadecimal, made from the page."""
    size = _RAW[vector["dtype"]].itemsize
    width = 8 * size
    base, new = (array.tolist() for array in _states(vector))
    gaps, steps, escapes, old, values = b"", b"", b"", b"", b""
    last = -1
    for position in range(vector["count"]):
        if base[position] == new[position]:
            continue
        skips, rest = divmod(position - last, 255)
        gaps += b"\xff" * skips + bytes([rest])
        last = position
        step = (_order(new[position], width) - _order(base[position], width)) % (1 << width)
        if step >= 1 << (width - 1):
            step -= 1 << width
        byte = 2 * step if step > 0 else -2 * step - 1
        steps += bytes([byte if byte <= 255 else 0])
        escapes += new[position].to_bytes(size, "little") if byte > 255 else b""
        old += base[position].to_bytes(size, "little")
        values += new[position].to_bytes(size, "little")
    checksum = xxhash.xxh3_64_intdigest(values, seed=xxhash.xxh3_64_intdigest(old))

    def payload(num_escapes: int, *planes: bytes) -> str:
        head = struct.pack("<QIII", checksum, len(steps), len(gaps), num_escapes)
        sizes = struct.pack(f"<{len(planes)}I", *map(len, planes))
        return (head + sizes + b"".join(planes)).hex()

    return {
        "gap_ulp": payload(len(escapes) // size, gaps, steps, escapes),
        "gap_value": payload(0, gaps, *[values[byte::size] for byte in range(size)]),
    }


@pytest.mark.parametrize("name", list(_vectors()))
def test_a_second_implementation_from_the_page_gives_the_golden_payloads(name: str) -> None:
    vector = _vectors()[name]
    assert plain_payloads(vector) == vector["payloads"]


@pytest.mark.parametrize("name", list(_vectors()))
def test_the_codec_makes_the_golden_planes_and_digest(name: str) -> None:
    vector = _vectors()[name]
    base, new = _states(vector)
    tensor, start = vector["tensor_index"], vector["start"]
    planes = diff_bucket(base, new, name_id=tensor, start=start)
    payload = bytes.fromhex(vector["payloads"]["gap_ulp"])
    body = planes.gaps.tobytes() + planes.steps.tobytes() + planes.escapes.tobytes()
    assert body == payload[32:]
    assert planes.change_checksum == int.from_bytes(payload[:8], "little")
    assert state_digest(tensor, start, base) == int(vector["base_digest"], 16)
    after = (state_digest(tensor, start, base) + planes.digest_change) % DIGEST_MODULUS
    assert after == state_digest(tensor, start, new) == int(vector["new_digest"], 16)


@pytest.mark.parametrize("kind", ["gap_ulp", "gap_value"])
@pytest.mark.parametrize("name", list(_vectors()))
def test_the_golden_payloads_lead_to_the_golden_state(name: str, kind: str) -> None:
    vector = _vectors()[name]
    base, new = _states(vector)
    payload = bytes.fromhex(vector["payloads"][kind])
    change = decode_bucket(
        EncodedBucket(
            encoding=BucketEncoding[kind.upper()],
            count=vector["count"],
            payload=payload,
            payload_checksum=xxhash.xxh3_64_intdigest(payload),
        ),
        base,
    )
    apply_change(base, change)
    assert base.tobytes() == new.tobytes()


def test_there_is_a_vector_for_each_dtype() -> None:
    assert {vector["dtype"] for vector in _vectors().values()} == set(_RAW)
