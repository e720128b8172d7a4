"""Per-token scores that another model gives to recorded samples."""

import msgspec
import numpy as np
import numpy.typing as npt


class TokenSequence(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A recorded sample to score: prompt int32 [P], response int32 [T]."""

    record_id: str
    prompt_token_ids: npt.NDArray[np.int32]
    response_token_ids: npt.NDArray[np.int32]


class TokenScores(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One column of scores for one record: float32 [T], one value a response token."""

    record_id: str
    column: str
    values: npt.NDArray[np.float32]
