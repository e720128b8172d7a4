"""The planes of a bucket from tensors: the same bytes as from arrays."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner import weight_delta
from headrace.engine.errors import InputError
from headrace.engine.types import BucketEncoding
from headrace.engine.weights import delta, planes
from headrace.engine.weights.layout import BUCKET_ELEMENTS

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def states(dtype: torch.dtype, count: int, density: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Any bit patterns; most changes are small steps, some are jumps."""
    rng = np.random.default_rng(seed)
    raw = np.uint32 if dtype == torch.float32 else np.uint16
    top = np.iinfo(raw).max
    base = rng.integers(0, top, count, raw, endpoint=True)
    new = base.copy()
    moved = np.flatnonzero(rng.random(count) < density)
    steps = np.array([1, 1, 1, 2, 127, 128, top, top, top - 126, top - 127, top // 2 + 1], raw)
    new[moved] += rng.choice(steps, len(moved))
    new[moved[::9]] = rng.integers(0, top, len(moved[::9]), raw, endpoint=True)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    signed = np.int32 if dtype == torch.float32 else np.int16
    before, after = (torch.from_numpy(array.view(signed)).view(bits).view(dtype) for array in (base, new))
    return before, after


def assert_same_planes(base: torch.Tensor, new: torch.Tensor, name_id: int = 0, start: int = 0) -> None:
    found = weight_delta.diff_bucket(base, new, name_id=name_id, start=start)
    arrays = weight_delta.host_bits(base), weight_delta.host_bits(new)
    awaited = planes.diff_bucket(*arrays, name_id=name_id, start=start)
    for field in ("gaps", "steps", "escapes", "values"):
        one, other = getattr(found, field), getattr(awaited, field)
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes(), field
    assert (found.count, found.change_checksum, found.digest_change) == (
        awaited.count,
        awaited.change_checksum,
        awaited.digest_change,
    )
    assert weight_delta.encode_bucket(base, new) == delta.encode_bucket(*arrays)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(1, 40_000),
    density=st.sampled_from([0.0, 0.0005, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**32 - 1),
    name_id=st.integers(0, 2**31),
    start=st.sampled_from([0, 1, 16_383, 10**10 + 1]),
)
def test_planes_and_digest_are_those_of_the_arrays(
    dtype: torch.dtype, count: int, density: float, seed: int, name_id: int, start: int
) -> None:
    assert_same_planes(*states(dtype, count, density, seed), name_id=name_id, start=start)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_jump_across_the_whole_range_is_the_same_step(dtype: torch.dtype) -> None:
    # The lowest and the highest order: they differ by more than a signed integer of the width holds.
    bits = {torch.int16: [-1, 0x7FFF, 0, -0x8000], torch.int32: [-1, 0x7FFF_FFFF, 0, -0x8000_0000]}
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    base = torch.tensor(bits[kind], dtype=kind)
    assert_same_planes(base.view(dtype), base.flip(0).view(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_found_on_the_device_leads_to_the_new_bits(dtype: torch.dtype) -> None:
    base, new = states(dtype, 5000, 0.02, 0)
    state = weight_delta.host_bits(base).copy()
    delta.apply_change(state, delta.decode_bucket(weight_delta.encode_bucket(base, new), state))
    assert state.tobytes() == weight_delta.host_bits(new).tobytes()


def test_nan_payloads_and_both_zeros_are_compared_as_bits() -> None:
    base = torch.tensor([0x7FC0, 0x7FC1, 0, -0x8000], dtype=torch.int16).view(torch.bfloat16)
    assert weight_delta.encode_bucket(base, base.clone()).encoding is BucketEncoding.SAME
    new = torch.tensor([0x7FC1, 0x7FC1, -0x8000, -0x8000], dtype=torch.int16).view(torch.bfloat16)
    assert weight_delta.diff_bucket(base, new).gaps.tolist() == [1, 2]


def test_parameters_that_need_gradients_are_taken_as_they_are() -> None:
    base = torch.zeros(10, requires_grad=True)
    new = torch.nn.Parameter(torch.ones(10))
    assert weight_delta.diff_bucket(base, new).count == 10


@pytest.mark.parametrize(
    ("base", "new"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)),
        (torch.zeros(3), torch.zeros(3, device="meta")),
        (torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(2, 2), torch.zeros(2, 2)),
        (torch.zeros(0), torch.zeros(0)),
        (torch.zeros(BUCKET_ELEMENTS + 1, dtype=torch.float16),) * 2,
    ],
)
def test_what_is_no_bucket_is_refused(base: torch.Tensor, new: torch.Tensor) -> None:
    with pytest.raises(InputError):
        weight_delta.diff_bucket(base, new)
