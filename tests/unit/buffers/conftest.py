"""Headers of made-up records."""

from collections.abc import Callable

import pytest

from headrace.engine.types import PolicyVersion
from headrace.engine.types.records import RecordHeader

MakeHeader = Callable[..., RecordHeader]


@pytest.fixture
def header() -> MakeHeader:
    """Makes the header of sample `index` of a group; `version` is that of all its tokens."""

    def make(
        group: str,
        index: int = 0,
        *,
        size: int = 1,
        attempt: int = 0,
        version: int = 0,
        tokens: int = 10,
        **changes: object,
    ) -> RecordHeader:
        fields: dict[str, object] = {
            "record_id": f"{group}/{index}/{attempt}",
            "group_id": group,
            "sample_index": index,
            "attempt": attempt,
            "group_size": size,
            "oldest_version": PolicyVersion(0, version),
            "newest_version": PolicyVersion(0, version),
            "num_prompt_tokens": tokens,
            "num_response_tokens": tokens,
            "num_loss_tokens": tokens,
            "mean_version": float(version),
        }
        return RecordHeader(**(fields | changes))  # type: ignore[arg-type]

    return make
