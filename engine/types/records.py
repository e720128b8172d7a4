"""What an index needs to know of an encoded record."""

import msgspec

from headrace.engine.types.policy import PolicyVersion


class RecordHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a record that admission, batching and eviction need, without its arrays.

    Attributes:
        record_id: `{group_id}/{sample_index}/{attempt}`.
        oldest_version, newest_version: Over the response tokens.
        num_prompt_tokens, num_response_tokens: Lengths P and T of the record's arrays.
        num_loss_tokens: Response tokens with loss mask 1.
        mean_version: Token mean of the version counter (incarnations apart).
    """

    record_id: str
    group_id: str
    sample_index: int
    attempt: int
    group_size: int
    oldest_version: PolicyVersion
    newest_version: PolicyVersion
    num_prompt_tokens: int
    num_response_tokens: int
    num_loss_tokens: int
    mean_version: float
