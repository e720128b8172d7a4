"""Where the tokens of a packed micro-batch stand in the rows that the model sees (numpy only; pure).

Only what a scored token needs is computed: a sequence without loss tokens is left out, and so is everything from its
last loss token on. Samples of one prompt share it: the prompt stands once, followed by the responses as branches that
see the prompt and themselves. With 8 samples of a 45-token prompt and 12-token responses a row has 133 tokens, not 448.

Invariants:
- A branch sees exactly its own prompt and its own earlier tokens, at the positions it would have alone.
- A padding position sees itself only (plain rows: what is before it), and nothing that is scored sees it.
- Each loss token has exactly one source: the position of the token before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from headrace.engine.types import MicroBatch

Ints = npt.NDArray[np.int64]
LayoutMode = Literal["auto", "plain"]

_PADDING = -1
_PROMPT = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """B rows of W tokens; K tokens are scored.

    Attributes:
        token_ids: int64 [B, W].
        position_ids: int64 [B, W].
        attention: bool [B, W, W], True where a query (axis 1) sees a key (axis 2); None for plain causal rows.
        source: int64 [max(K, 1)], the position in the flattened rows whose output scores each token.
        target: int64 [K], the scored tokens' positions in the micro-batch.
    """

    token_ids: Ints
    position_ids: Ints
    attention: npt.NDArray[np.bool_] | None
    source: Ints
    target: Ints


@dataclass(frozen=True, slots=True)
class _Branch:
    prefix: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]  # from the first loss token up to, not including, the last one
    scored: Ints  # positions in the micro-batch
    source: Ints  # their predecessors' positions in prefix + tokens


_Unit = list[_Branch]  # branches of one prompt, laid out together


def lay_out(micro_batch: MicroBatch, *, hidden_size: int, mode: LayoutMode = "auto") -> RowLayout:
    """Choose the cheapest rows for a micro-batch.

    Args:
        micro_batch: The packed tokens.
        hidden_size: Of the model; weighs attention against the rest of a layer.
        mode: "plain" puts one sequence into each row, which every causal model keeps apart; "auto" may also share
            prompts and put several sequences into a row, which needs a model that honours a mask.
    """
    branches = _branches(micro_batch)
    if not branches:
        return _nothing_scored(micro_batch)
    alone: list[_Unit] = [[branch] for branch in branches]
    best_rows: list[list[_Unit]] = [[unit] for unit in alone]
    if mode == "plain":
        return _fill(best_rows, masked=False)
    best_masked, best_cost = False, _cost(best_rows, hidden_size, masked=False)
    for units in _shared_units(branches):
        rows = _first_fit(units)
        cost = _cost(rows, hidden_size, masked=True)
        if cost < best_cost:
            best_rows, best_masked, best_cost = rows, True, cost
    return _fill(best_rows, masked=best_masked)


def _nothing_scored(micro_batch: MicroBatch) -> RowLayout:
    zero = np.zeros(1, dtype=np.int64)
    token = micro_batch.token_ids[:1].astype(np.int64)
    return RowLayout(token_ids=token[None], position_ids=zero[None], attention=None, source=zero, target=zero[:0])


def _branches(micro_batch: MicroBatch) -> list[_Branch]:
    starts = np.flatnonzero(micro_batch.position_ids == 0)
    found: list[_Branch] = []
    for start, end in zip(starts, [*starts[1:], micro_batch.token_ids.size], strict=True):
        loss = np.flatnonzero(micro_batch.loss_mask[start:end])
        if loss.size == 0:
            continue
        first, last = int(loss[0]), int(loss[-1])
        assert first > 0, "the first token of a sequence has no score"
        tokens = micro_batch.token_ids[start:end]
        found.append(
            _Branch(prefix=tokens[:first], tokens=tokens[first:last], scored=loss + int(start), source=loss - 1)
        )
    return found


def _shared_units(branches: Sequence[_Branch]) -> list[list[_Unit]]:
    """Ways to share prompts: at most 1, 2, 4, ... branches together. Long responses are cheaper in small units."""
    by_prefix: dict[bytes, _Unit] = {}
    for branch in branches:
        by_prefix.setdefault(branch.prefix.tobytes(), []).append(branch)
    most = max(len(unit) for unit in by_prefix.values())
    ways: list[list[_Unit]] = []
    size = 1
    while True:
        ways.append([unit[i : i + size] for unit in by_prefix.values() for i in range(0, len(unit), size)])
        if size >= most:
            return ways
        size *= 2


def _width(unit: _Unit) -> int:
    return len(unit[0].prefix) + sum(len(branch.tokens) for branch in unit)


def _first_fit(units: Sequence[_Unit]) -> list[list[_Unit]]:
    """Units into rows as wide as the widest unit; longest first, each into the first row with room."""
    ordered = sorted(units, key=_width, reverse=True)
    width = _width(ordered[0])
    rows: list[list[_Unit]] = []
    room: list[int] = []
    for unit in ordered:
        need = _width(unit)
        row = next((index for index, free in enumerate(room) if free >= need), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(unit)
        room[row] -= need
    return rows


def _cost(rows: Sequence[Sequence[_Unit]], hidden_size: int, *, masked: bool) -> int:
    """Relative arithmetic of a pass: a layer's matrices (about 12 H² weights) and attention over the row."""
    width = max(sum(_width(unit) for unit in row) for row in rows)
    attention = 2 * width if masked else width  # a causal kernel skips the upper half
    return len(rows) * width * (6 * hidden_size + attention)


def _fill(rows: Sequence[Sequence[_Unit]], *, masked: bool) -> RowLayout:
    width = max(sum(_width(unit) for unit in row) for row in rows)
    shape = (len(rows), width)
    token_ids = np.zeros(shape, dtype=np.int64)
    position_ids = np.broadcast_to(np.arange(width, dtype=np.int64), shape).copy()
    unit_of = np.full(shape, _PADDING, dtype=np.int32)
    branch_of = np.full(shape, _PROMPT, dtype=np.int32)
    sources: list[Ints] = []
    targets: list[Ints] = []
    for row, units in enumerate(rows):
        at = 0
        for number, unit in enumerate(units):
            prefix = unit[0].prefix
            begin, at = at, at + len(prefix)
            token_ids[row, begin:at] = prefix
            position_ids[row, begin:at] = np.arange(len(prefix))
            unit_of[row, begin : begin + _width(unit)] = number
            for index, branch in enumerate(unit):
                end = at + len(branch.tokens)
                token_ids[row, at:end] = branch.tokens
                position_ids[row, at:end] = len(prefix) + np.arange(len(branch.tokens))
                branch_of[row, at:end] = index + 1
                in_branch = branch.source - len(prefix)
                sources.append(row * width + np.where(in_branch < 0, begin + branch.source, at + in_branch))
                targets.append(branch.scored)
                at = end
    return RowLayout(
        token_ids=token_ids,
        position_ids=position_ids,
        attention=_visibility(unit_of, branch_of) if masked else None,
        source=np.concatenate(sources),
        target=np.concatenate(targets),
    )


def _visibility(unit_of: npt.NDArray[np.int32], branch_of: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    width = unit_of.shape[1]
    same_unit = (unit_of[:, :, None] == unit_of[:, None, :]) & (unit_of[:, :, None] != _PADDING)
    own_or_prompt = (branch_of[:, :, None] == branch_of[:, None, :]) | (branch_of[:, None, :] == _PROMPT)
    causal = np.tri(width, dtype=np.bool_)
    # Padding sees itself: a row of a mask without any True would make attention NaN.
    visible: npt.NDArray[np.bool_] = (same_unit & own_or_prompt & causal) | np.eye(width, dtype=np.bool_)
    return visible
