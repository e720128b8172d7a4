"""Cost of incremental weight updates: bytes a changed element, and GB of bfloat16 model encoded and applied a second.

All figures are those of one thread. A time is the sum over buckets of each bucket's best of `ROUNDS` rounds; what is
compared takes turns within a round. Encoding is all that a sender does with a bucket: comparison, planes, compression,
checksums, digest. Decoding is checksums, decompression, decoding and writing the elements; the digest stands beside it.
"""

import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.clients.cli.bench import Figures
from headrace.clients.cli.benchmarks.weights_model import Half, Model, States
from headrace.engine.weights.delta import BucketChange, EncodedBucket, apply_change, decode_bucket, pack_planes
from headrace.engine.weights.digest import change_digest, state_digest
from headrace.engine.weights.planes import diff_bucket

ROUNDS = 7
SMALL_BUCKETS, LARGE_BUCKETS = 4, 16
SHARES = {"0.01pct": 0.0001, "0.1pct": 0.001, "1pct": 0.0098, "10pct": 0.1}
LARGE_CHANGE = 0.34

# A baseline that XORs two buckets and packs the result, and back; None where its library is not installed.
Pack = Callable[[Half, Half], bytes]
Unpack = Callable[[bytes, Half], None]


@dataclass(slots=True)
class Times:
    """The best time of each bucket so far, in seconds."""

    best_s: dict[int, float] = field(default_factory=dict[int, float])

    def add(self, bucket: int, begin_s: float) -> None:
        """Take what has passed since `begin_s`."""
        taken_s = time.perf_counter() - begin_s
        self.best_s[bucket] = min(taken_s, self.best_s.get(bucket, taken_s))

    @property
    def total_s(self) -> float:
        """Of all buckets."""
        return sum(self.best_s.values())


@dataclass(slots=True, kw_only=True)
class Measured:
    """What one way to send an update took."""

    encode: Times = field(default_factory=Times)
    decode: Times = field(default_factory=Times)
    digest: Times = field(default_factory=Times)
    sent_bytes: int = 0


def run() -> Figures:
    """Measure updates of 1% and 34%, and the table over shares and sizes; blocks for about a minute."""
    return figures(Model(SMALL_BUCKETS), Model(LARGE_BUCKETS), ROUNDS)


def figures(small: Model, large: Model, rounds: int) -> Figures:
    """The headline, the raw figures below it, and the table."""
    baseline = xor_zstd()
    few, many = small.states(SHARES["1pct"]), small.states(LARGE_CHANGE)
    ours, theirs = measure(few, rounds, baseline)
    ours_many, _ = measure(many, max(2, rounds // 3), None)
    headline: dict[str, float | Figures] = {
        "bytes_per_changed_1pct": ours.sent_bytes / few.changed,
        "full_over_delta_bytes_1pct": few.num_bytes / ours.sent_bytes,
        "bytes_per_changed_34pct": ours_many.sent_bytes / many.changed,
        "encode_gb_per_s": few.num_bytes / ours.encode.total_s / 1e9,
        "decode_apply_gb_per_s": few.num_bytes / ours.decode.total_s / 1e9,
        "state_digest_gb_per_s": few.num_bytes / _state_digest_s(few, rounds) / 1e9,
    }
    if theirs is not None:
        headline |= {
            "encode_over_xor_zstd": theirs.encode.total_s / ours.encode.total_s,
            "decode_over_xor_zstd": theirs.decode.total_s / ours.decode.total_s,
            "bytes_over_xor_zstd": ours.sent_bytes / theirs.sent_bytes,
            "xor_zstd_1pct": _raw(few, theirs),
        }
    table = {
        f"{model.num_elements >> 20}mi_elements": {name: _row(model.states(share)) for name, share in SHARES.items()}
        for model in (small, large)
    }
    return headline | {"delta_1pct": _raw(few, ours), "delta_34pct": _raw(many, ours_many), "table": table}


def measure(states: States, rounds: int, baseline: tuple[Pack, Unpack] | None) -> tuple[Measured, Measured | None]:
    """Send the update `rounds` times, in both ways in turn.

    Raises:
        AssertionError: What arrived is not what was sent.
    """
    ours, theirs = Measured(), None if baseline is None else Measured()
    for _ in range(rounds):
        ours.sent_bytes = 0
        if theirs is not None:
            theirs.sent_bytes = 0
        for bucket, (base, new) in enumerate(zip(states.base, states.new, strict=True)):
            _delta_round(ours, bucket, base, new)
            if baseline is not None and theirs is not None:
                _baseline_round(theirs, bucket, base, new, baseline)
    return ours, theirs


def xor_zstd() -> tuple[Pack, Unpack] | None:
    """XOR with the base, bytes shuffled, Zstandard at level 1 on one thread, by a compiled library."""
    try:
        blosc: Any = importlib.import_module("numcodecs.blosc")
    except ImportError:
        print("weights: numcodecs is not installed, so the comparison with XOR and zstd is left out", file=sys.stderr)
        return None
    blosc.use_threads = False
    codec = blosc.Blosc(cname="zstd", clevel=1, shuffle=blosc.SHUFFLE)

    def pack(base: Half, new: Half) -> bytes:
        return bytes(codec.encode(np.bitwise_xor(base.view(np.uint64), new.view(np.uint64)).view(np.uint16)))

    def unpack(payload: bytes, target: Half) -> None:
        words = target.view(np.uint64)
        np.bitwise_xor(words, np.frombuffer(codec.decode(payload), np.uint64), out=words)

    return pack, unpack


def _delta_round(to: Measured, bucket: int, base: Half, new: Half) -> None:
    begin_s = time.perf_counter()
    planes = diff_bucket(base, new)
    encoded: EncodedBucket = pack_planes(planes, lambda: new)
    to.encode.add(bucket, begin_s)
    to.sent_bytes += len(encoded.payload)
    target = base.copy()
    begin_s = time.perf_counter()
    change: BucketChange = decode_bucket(encoded, target)
    apply_change(target, change)
    to.decode.add(bucket, begin_s)
    assert np.array_equal(target, new), "a bucket did not arrive as it was sent"
    if change.positions is not None:
        old = base[change.positions]
        begin_s = time.perf_counter()
        digest = change_digest(0, 0, change.positions, old, change.values)
        to.digest.add(bucket, begin_s)
        assert digest == planes.digest_change, "the digests of both ends differ"


def _baseline_round(to: Measured, bucket: int, base: Half, new: Half, baseline: tuple[Pack, Unpack]) -> None:
    pack, unpack = baseline
    begin_s = time.perf_counter()
    payload = pack(base, new)
    to.encode.add(bucket, begin_s)
    to.sent_bytes += len(payload)
    target = base.copy()
    begin_s = time.perf_counter()
    unpack(payload, target)
    to.decode.add(bucket, begin_s)
    assert np.array_equal(target, new), "a bucket did not arrive as it was sent"


def _state_digest_s(states: States, rounds: int) -> float:
    times = Times()
    for _ in range(rounds):
        for bucket, base in enumerate(states.base):
            begin_s = time.perf_counter()
            state_digest(0, 0, base)
            times.add(bucket, begin_s)
    return times.total_s


def _row(states: States) -> Figures:
    return _raw(states, measure(states, 3, None)[0])


def _raw(states: States, measured: Measured) -> dict[str, float]:
    found = {
        "model_bytes": float(states.num_bytes),
        "changed_elements": float(states.changed),
        "changed_share": 2 * states.changed / states.num_bytes,
        "one_ulp_share": states.one_ulp,
        "learning_rate": states.learning_rate,
        "sent_bytes": float(measured.sent_bytes),
        "bytes_per_changed": measured.sent_bytes / states.changed,
        "encode_s": measured.encode.total_s,
        "decode_apply_s": measured.decode.total_s,
    }
    return found | {"change_digest_s": measured.digest.total_s} if measured.digest.best_s else found
