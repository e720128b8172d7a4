"""The step between two floats of one width, counted in neighbouring floats (units in the last place, ulp).

`order` maps the bits of an IEEE-like float (sign, exponent, fraction: bfloat16, float16, float32) to a signed integer
of the same width, such that neighbouring floats have neighbouring integers. All arithmetic is modulo 2**width, so every
bit pattern goes through unchanged: NaN payloads, infinities, denormals and both zeros.

A step byte is the zigzag of the difference of two orders: 1, 2, 3, 4 ... stand for -1, +1, -2, +2 ...; what exceeds 255
is 0, the escape, and the new bits stand in a list beside the bytes. A changed element never has a step of zero.
"""

import numpy as np
import numpy.typing as npt

from headrace.engine.errors import CorruptUpdateError

# The bits of elements: uint16 for bfloat16 and float16, uint32 for float32.
RawArray = npt.NDArray[np.uint16 | np.uint32]

Bytes = npt.NDArray[np.uint8]

# Bytes 1, 2, 3, 4, ... as steps -1, +1, -2, +2, ...; the escape decodes to nothing.
_STEPS = np.array([(byte >> 1) ^ -(byte & 1) for byte in range(256)], np.int32)
_STEPS_16, _STEPS_32 = _STEPS.astype(np.int16), _STEPS


def order(bits: RawArray) -> npt.NDArray[np.signedinteger]:
    """The signed rank of each float among all bit patterns. Of the same width; negative for a set sign bit."""
    if bits.dtype.itemsize == 2:
        short = bits.view(np.int16)
        return short ^ ((short >> 15) & np.int16(0x7FFF))
    word = bits.view(np.int32)
    return word ^ ((word >> 31) & np.int32(0x7FFF_FFFF))


def encode_steps(old: RawArray, new: RawArray) -> tuple[Bytes, RawArray]:
    """Step bytes, shape [n], and the new bits of those that a byte cannot hold, in order, shape [num_escapes].

    Args:
        old: Bits before, shape [n].
        new: Bits after, shape [n], of the same dtype and different from `old` everywhere.
    """
    step = order(new) - order(old)
    zigzag = ((step << 1) ^ (step >> (8 * old.dtype.itemsize - 1))).view(old.dtype)
    steps = zigzag.astype(np.uint8)
    escaped = np.flatnonzero(zigzag > 255)
    steps[escaped] = 0
    return steps, new[escaped]


def decode_steps(old: RawArray, steps: Bytes, escapes: RawArray) -> RawArray:
    """The new bits, shape [n].

    Args:
        old: Bits before, shape [n].
        steps: Step bytes, shape [n].
        escapes: New bits of the elements whose byte is 0, in order.

    Raises:
        CorruptUpdateError: There are not as many escapes as bytes 0.
    """
    ranks = order(old)
    ranks += (_STEPS_16 if old.dtype.itemsize == 2 else _STEPS_32)[steps]
    # The order is its own inverse.
    new = order(ranks.view(old.dtype)).view(old.dtype)
    escaped = np.flatnonzero(steps == 0)
    if len(escaped) != len(escapes):
        raise CorruptUpdateError(f"{len(escaped)} steps are escaped, but {len(escapes)} values stand for them")
    new[escaped] = escapes
    return new
