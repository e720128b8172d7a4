"""Cost of the record codec: one trajectory of 1,000 response tokens, encoded, decoded and looked at."""

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from headrace.engine.records import decode_trajectory, encode_trajectory, peek_header
from headrace.engine.types import FinishReason, PolicyVersion, Trajectory, VersionSpan

NUM_PROMPT_TOKENS = 200
NUM_RESPONSE_TOKENS = 1_000
ROUNDS = 9
ROUND_S = 0.03


def run() -> dict[str, float]:
    """Median over rounds of the time of one call, in microseconds, and what that is in records a second."""
    trajectory = _trajectory()
    record = encode_trajectory(trajectory)
    encode_us = _call_us(lambda: encode_trajectory(trajectory))
    decode_us = _call_us(lambda: decode_trajectory(record))
    peek_us = _call_us(lambda: peek_header(record))
    return {
        "record_bytes": float(len(record)),
        "encode_us": encode_us,
        "decode_us": decode_us,
        "peek_us": peek_us,
        "round_trip_records_per_s": 1e6 / (encode_us + decode_us),
    }


def _call_us(call: Callable[[], object]) -> float:
    call()
    calls = 1
    while (elapsed := _elapsed_s(call, calls)) < ROUND_S / 4:
        calls *= 4
    calls = max(1, round(calls * ROUND_S / elapsed))
    return median(_elapsed_s(call, calls) for _ in range(ROUNDS)) / calls * 1e6


def _elapsed_s(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


def _trajectory() -> Trajectory:
    rng = np.random.default_rng(0)
    first = NUM_RESPONSE_TOKENS // 3
    return Trajectory(
        record_id="group-0/0/0",
        group_id="group-0",
        prompt_id="prompt-0",
        sample_index=0,
        group_size=8,
        attempt=0,
        prompt_token_ids=rng.integers(0, 50_000, NUM_PROMPT_TOKENS, dtype=np.int32),
        response_token_ids=rng.integers(0, 50_000, NUM_RESPONSE_TOKENS, dtype=np.int32),
        logprobs=-rng.exponential(1.0, NUM_RESPONSE_TOKENS).astype(np.float32),
        loss_mask=np.ones(NUM_RESPONSE_TOKENS, dtype=np.uint8),
        spans=(VersionSpan(PolicyVersion(0, 7), first), VersionSpan(PolicyVersion(0, 8), NUM_RESPONSE_TOKENS - first)),
        finish_reason=FinishReason.STOP,
        temperature=1.0,
        prompt_text="What is 3 + 4?",
        response_text="Three and four make seven. " * 100,
        data={"answer": "7"},
    )
