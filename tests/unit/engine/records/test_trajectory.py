"""Trajectories survive the codec, and broken ones do not enter it."""

import gc
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import FormatError, InputError, SchemaError
from headrace.engine.records import decode_trajectory, encode_trajectory, header_of, peek_header
from headrace.engine.testing.samples import assert_same_trajectory, make_trajectory
from headrace.engine.types import FinishReason, PolicyVersion, Trajectory, VersionSpan

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)
_VERSION = st.builds(PolicyVersion, st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1))


@st.composite
def _trajectories(draw: st.DrawFn) -> Trajectory:
    counts = draw(st.lists(st.integers(1, 5), max_size=4))
    num_tokens = sum(counts)
    mask = np.array(draw(st.lists(st.integers(0, 1), min_size=num_tokens, max_size=num_tokens)), np.uint8)
    values = draw(st.lists(st.floats(-50, 0, width=32), min_size=num_tokens, max_size=num_tokens))
    group_size = draw(st.integers(1, 9))
    ids = st.integers(0, 2**31 - 1)
    return Trajectory(
        record_id=draw(st.text("abc/0", min_size=1)),
        group_id=draw(st.text("abc", min_size=1)),
        prompt_id=draw(_TEXT),
        sample_index=draw(st.integers(0, group_size - 1)),
        group_size=group_size,
        attempt=draw(st.integers(0, 2**32 - 1)),
        prompt_token_ids=np.array(draw(st.lists(ids, max_size=6)), np.int32),
        response_token_ids=np.array(draw(st.lists(ids, min_size=num_tokens, max_size=num_tokens)), np.int32),
        logprobs=np.array(values, np.float32) * mask,
        loss_mask=mask,
        spans=tuple(VersionSpan(draw(_VERSION), count) for count in counts) or (VersionSpan(draw(_VERSION), 0),),
        finish_reason=draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORTED])),
        temperature=draw(st.floats(0, 100)),
        prompt_text=draw(_TEXT),
        response_text=draw(_TEXT),
        data=draw(st.dictionaries(_TEXT, _JSON, max_size=3)),
        started_at_s=draw(st.floats(0, 1e10)),
        finished_at_s=draw(st.floats(0, 1e10)),
    )


@settings(deadline=None, max_examples=100)
@given(_trajectories())
def test_any_valid_trajectory_comes_back_equal_and_with_the_same_header(t: Trajectory) -> None:
    encoded = encode_trajectory(t)
    decoded = decode_trajectory(encoded)
    assert_same_trajectory(decoded, t)
    assert peek_header(encoded) == header_of(t) == header_of(decoded)
    assert encode_trajectory(decoded) == encoded
    assert len(encoded) % 8 == 0


def test_a_response_without_tokens_keeps_the_version_that_was_asked() -> None:
    t = make_trajectory(
        num_response=0, spans=(VersionSpan(PolicyVersion(0, 7), 0),), finish_reason=FinishReason.ABORTED
    )
    header = peek_header(encode_trajectory(t))
    assert (header.num_response_tokens, header.num_loss_tokens) == (0, 0)
    assert header.oldest_version == header.newest_version == PolicyVersion(0, 7)
    assert header.mean_version == 7.0


def test_appended_eos_stays_in_the_record_without_loss() -> None:
    t = make_trajectory(
        num_response=4,
        loss_mask=np.array([1, 1, 1, 0], np.uint8),
        logprobs=np.array([-0.1, -0.2, -0.3, 0], np.float32),
    )
    encoded = encode_trajectory(t)
    decoded = decode_trajectory(encoded)
    assert decoded.loss_mask.tolist() == [1, 1, 1, 0]
    assert decoded.logprobs.size == 4
    assert peek_header(encoded).num_loss_tokens == 3


def test_partial_continuation_keeps_both_versions_and_the_masked_part() -> None:
    mask = np.repeat(np.array([0, 1], np.uint8), [60, 40])
    t = make_trajectory(
        num_response=100,
        loss_mask=mask,
        logprobs=np.where(mask == 1, np.float32(-1), np.float32(0)),
        spans=(VersionSpan(PolicyVersion(0, 7), 60), VersionSpan(PolicyVersion(0, 8), 40)),
        finish_reason=FinishReason.LENGTH,
    )
    header = peek_header(encode_trajectory(t))
    assert (header.num_response_tokens, header.num_loss_tokens) == (100, 40)
    assert (header.oldest_version, header.newest_version) == (PolicyVersion(0, 7), PolicyVersion(0, 8))


def test_version_stamp_gives_oldest_lag_2_and_mean_lag_1_6_at_version_5() -> None:
    spans = (VersionSpan(PolicyVersion(0, 3), 30), VersionSpan(PolicyVersion(0, 4), 20))
    header = peek_header(encode_trajectory(make_trajectory(num_response=50, spans=spans)))
    assert 5 - header.oldest_version.version == 2
    assert math.isclose(5 - header.mean_version, 1.6)


def _row(*values: float, dtype: Any = np.float32) -> Any:
    return np.array(values, dtype)


@pytest.mark.parametrize(
    ("changes", "clause"),
    [
        ({"loss_mask": _row(1, 2, dtype=np.uint8)}, "other than 0 and 1"),
        ({"loss_mask": _row(1, dtype=np.uint8)}, "1 mask entries"),
        ({"logprobs": _row(-1, float("nan"))}, "not finite"),
        ({"logprobs": _row(float("-inf"), 0)}, "not finite"),
        ({"logprobs": _row(-1, -1)}, "loss mask 0 has a log-probability"),
        ({"logprobs": _row(-1, 0, 0)}, "3 log-probabilities"),
        ({"spans": ()}, "no version span"),
        ({"spans": (VersionSpan(PolicyVersion(0, 1), 3),)}, "cover 3 tokens; the response has 2"),
        ({"spans": (VersionSpan(PolicyVersion(0, 1), 0), VersionSpan(PolicyVersion(0, 2), 2))}, "covers 0 tokens"),
        ({"spans": (VersionSpan(PolicyVersion(0, -1), 2),)}, "version 0:-1"),
        ({"prompt_token_ids": _row(-1, dtype=np.int32)}, "prompt token id is negative"),
        ({"sample_index": 4}, "sample_index is 4 in a group of 4"),
        ({"attempt": -1}, "attempt is -1"),
        ({"group_id": ""}, "must not be empty"),
        ({"finish_reason": FinishReason.NONE}, "only finished samples"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"finished_at_s": float("inf")}, "must be finite"),
        ({"data": {"answer": {1, 2}.__iter__()}}, "JSON types"),
        ({"response_text": "\ud800"}, "not valid Unicode"),
    ],
)
def test_a_broken_trajectory_is_refused_by_the_encoder(changes: dict[str, Any], clause: str) -> None:
    with pytest.raises(InputError, match=clause):
        encode_trajectory(make_trajectory(num_response=2, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": np.zeros(2, np.float64)},
        {"response_token_ids": np.zeros(2, np.int64)},
        {"response_token_ids": np.zeros(2, ">i4")},
        {"loss_mask": np.ones(2, np.bool_)},
        {"prompt_token_ids": np.zeros((1, 2), np.int32)},
        {"prompt_token_ids": np.array([object()])},
    ],
)
def test_an_array_of_another_dtype_or_rank_is_a_schema_error(changes: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="it must be"):
        encode_trajectory(make_trajectory(num_response=2, **changes))


def test_a_strided_array_is_encoded_by_value() -> None:
    ids = np.arange(20, dtype=np.int32)[::2]
    decoded = decode_trajectory(encode_trajectory(make_trajectory(prompt_token_ids=ids)))
    np.testing.assert_array_equal(decoded.prompt_token_ids, ids)


def test_data_may_nest_32_levels_and_no_more() -> None:
    def nested(levels: int) -> dict[str, Any]:
        return {"in": nested(levels - 1)} if levels > 1 else {"leaf": 1}

    assert decode_trajectory(encode_trajectory(make_trajectory(data=nested(32)))).data == nested(32)
    with pytest.raises(InputError, match="32 levels"):
        encode_trajectory(make_trajectory(data=nested(33)))


def test_zero_copy_lifetime_decoded_arrays_are_read_only_and_keep_the_bytes_alive() -> None:
    t = make_trajectory()
    decoded = decode_trajectory(encode_trajectory(t))
    gc.collect()
    tail = decoded.response_token_ids[-2:]
    assert tail.tolist() == t.response_token_ids[-2:].tolist()
    with pytest.raises(ValueError, match="read-only"):
        tail[0] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        decoded.logprobs.flags.writeable = True


def test_zero_copy_lifetime_a_writable_buffer_is_refused_unless_copied() -> None:
    t = make_trajectory()
    receive_buffer = bytearray(encode_trajectory(t))
    with pytest.raises(InputError, match="writable"):
        decode_trajectory(receive_buffer)
    with pytest.raises(InputError, match="writable"):
        peek_header(memoryview(receive_buffer))
    decoded = decode_trajectory(receive_buffer, copy=True)
    header = peek_header(memoryview(receive_buffer).toreadonly())
    receive_buffer[:] = bytes(len(receive_buffer))
    assert_same_trajectory(decoded, t)
    assert header == header_of(t)


@pytest.mark.parametrize("num_response", [0, 1, 8])
def test_zero_copy_lifetime_a_view_never_shows_a_neighbour(num_response: int) -> None:
    t = make_trajectory(num_response=num_response, spans=(VersionSpan(PolicyVersion(0, 1), num_response),))
    slot = encode_trajectory(t) * 3
    size = len(slot) // 3
    decoded = decode_trajectory(memoryview(slot)[size : 2 * size])
    assert_same_trajectory(decoded, t)
    with pytest.raises(FormatError):
        decode_trajectory(memoryview(slot)[size : 2 * size + 8])


def test_a_buffer_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(InputError, match="contiguous"):
        decode_trajectory(memoryview(encode_trajectory(make_trajectory()))[::2])
