"""The planes of a bucket from tensors on a CUDA device: the same bytes as from arrays. Needs a CUDA device."""

import numpy as np
import pytest
import torch

from headrace.actors.learner import weight_delta
from headrace.engine.weights import delta, planes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("density", [0.0, 0.0001, 0.01, 0.34, 1.0])
def test_planes_found_on_the_device_are_those_of_the_arrays(dtype: torch.dtype, density: float) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    masters = torch.randn(1 << 20, device="cuda", generator=generator) * 0.05
    base = masters.to(dtype)
    moved = torch.rand(len(base), device="cuda", generator=generator) < density
    new = torch.where(moved, masters * 1.01, base.float()).to(dtype)
    found = weight_delta.diff_bucket(base, new, name_id=3, start=12_345)
    arrays = weight_delta.host_bits(base), weight_delta.host_bits(new)
    awaited = planes.diff_bucket(*arrays, name_id=3, start=12_345)
    for field in ("gaps", "steps", "escapes", "values"):
        assert np.array_equal(getattr(found, field), getattr(awaited, field)), field
    assert (found.change_checksum, found.digest_change) == (awaited.change_checksum, awaited.digest_change)
    assert weight_delta.encode_bucket(base, new) == delta.encode_bucket(*arrays)
