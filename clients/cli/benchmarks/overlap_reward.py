"""The scoring function of the overlap benchmark: cheap, always the same, and hardly ever equal within a group."""

import zlib
from collections.abc import Mapping


def score(prompt: str, response: str, data: Mapping[str, object]) -> float:
    """A number in [0, 1) that depends on the response alone."""
    return zlib.crc32(response.encode()) / 2**32
