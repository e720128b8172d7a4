# pyright: basic
# (torch's own annotations are partial)
"""Finding what changed in a bucket on the device where it lies: the planes of `engine/weights/planes.py`, from tensors.

Only what changed leaves the device, about six bytes a changed element: gap byte, step byte, the bits before and after.
The planes are the same bytes that `diff_bucket` makes of the same bits on the host, and so is the digest.
"""

import numpy as np
import torch

from headrace.engine.errors import InputError
from headrace.engine.weights.delta import EncodedBucket, pack_planes
from headrace.engine.weights.digest import DIGEST_MODULUS, element_keys, row_keys
from headrace.engine.weights.gaps import SKIP
from headrace.engine.weights.layout import BUCKET_ELEMENTS
from headrace.engine.weights.planes import BucketPlanes, change_checksum
from headrace.engine.weights.ulp import RawArray

# The dtypes of published weights, and integers of their width: bits are compared and moved, floats are not.
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def encode_bucket(base: torch.Tensor, new: torch.Tensor) -> EncodedBucket:
    """Encode `new` against `base` in the smallest encoding; `diff_bucket` has the arguments and errors."""
    return pack_planes(diff_bucket(base, new), lambda: host_bits(new))


def diff_bucket(base: torch.Tensor, new: torch.Tensor, *, name_id: int = 0, start: int = 0) -> BucketPlanes:
    """Compare two states of one bucket, bit by bit, on their device. Blocks until the device is done.

    Args:
        base: The base state, bfloat16, float16 or float32, shape [count], contiguous.
        new: The new state, of the same dtype, shape and device.
        name_id: The tensor's index in the layout; for the digest.
        start: The bucket's first element in the flattened tensor; for the digest.

    Raises:
        InputError: Dtypes, shapes or devices differ or are not allowed, or the bucket is too large.
    """
    _check(base, new)
    before, after = base.detach().view(_BITS[base.dtype]), new.detach().view(_BITS[new.dtype])
    positions = torch.nonzero(before != after).reshape(-1)
    old, changed = before[positions], after[positions]
    steps, escaped = _steps(old, changed)
    values = _raw(changed)
    return BucketPlanes(
        count=len(base),
        gaps=_gaps(positions).cpu().numpy(),
        steps=steps.cpu().numpy(),
        escapes=_raw(changed[escaped]),
        values=values,
        change_checksum=change_checksum(_raw(old), values),
        digest_change=_digest_change(name_id, positions + start, old, changed),
    )


def host_bits(tensor: torch.Tensor) -> RawArray:
    """The bits of a tensor in the host's memory, flat, uint16 or uint32; shares memory with a tensor that is there."""
    return _raw(tensor.detach().reshape(-1).view(_BITS[tensor.dtype]))


def _check(base: torch.Tensor, new: torch.Tensor) -> None:
    if (new.dtype, new.shape, new.device) != (base.dtype, base.shape, base.device):
        raise InputError(
            f"base is {base.dtype} {tuple(base.shape)} on {base.device}, new is {new.dtype} {tuple(new.shape)} on "
            f"{new.device}; both must have one dtype, shape and device"
        )
    if base.dtype not in _BITS or base.ndim != 1 or not 0 < len(base) <= BUCKET_ELEMENTS:
        raise InputError(
            f"a bucket of {base.dtype} {tuple(base.shape)} was given; it is flat, has 1 to {BUCKET_ELEMENTS} elements "
            f"and one of the dtypes {', '.join(map(str, _BITS))}"
        )


def _raw(bits: torch.Tensor) -> RawArray:
    return bits.cpu().numpy().view(np.uint16 if bits.dtype == torch.int16 else np.uint32)


def _gaps(positions: torch.Tensor) -> torch.Tensor:
    if not len(positions):
        return positions.to(torch.uint8)
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1))
    skips = torch.div(gaps, SKIP, rounding_mode="floor")
    ends = torch.arange(len(gaps), device=gaps.device) + torch.cumsum(skips, 0)
    encoded = torch.full((int(ends[-1]) + 1,), SKIP, dtype=torch.uint8, device=gaps.device)
    encoded[ends] = (gaps - SKIP * skips).to(torch.uint8)
    return encoded


def _steps(old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Step bytes and which of them are escaped."""
    # In 64 bits nothing overflows, so the wrap to the elements' width has to be made by hand.
    width = 8 * old.element_size()
    half = 1 << (width - 1)
    step = _order(new, half) - _order(old, half)
    step = torch.remainder(step + half, 2 * half) - half
    zigzag = (step << 1) ^ (step >> 63)
    escaped = zigzag > 255
    return torch.where(escaped, 0, zigzag).to(torch.uint8), escaped


def _order(bits: torch.Tensor, half: int) -> torch.Tensor:
    wide = bits.to(torch.int64)
    return torch.where(wide < 0, wide ^ (half - 1), wide)


def _digest_change(name_id: int, at: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> int:
    """As `change_digest`; int64 products and sums wrap as uint64 ones do."""
    if not len(at):
        return 0
    keys = element_keys(new.element_size())
    rows = at // len(keys)
    first, last = int(rows[0]), int(rows[-1])
    unsigned = (1 << (8 * new.element_size())) - 1
    change = (new.to(torch.int64) & unsigned) - (old.to(torch.int64) & unsigned)
    column_keys = torch.from_numpy(keys.view(np.int64).copy()).to(at.device)
    keys_of_rows = torch.from_numpy(row_keys(name_id, first, last - first + 1).view(np.int64)).to(at.device)
    products = change * column_keys[at % len(keys)] * keys_of_rows[rows - first]
    return int(products.sum()) % DIGEST_MODULUS
