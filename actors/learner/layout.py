"""Where the tokens of a packed micro-batch stand in the rows that the model sees (numpy only; pure).

Only what a scored token needs is computed: a sequence without loss tokens is left out, and so is everything from its
last loss token on. Samples of one prompt share it: the prompt stands once, followed by the responses as branches that
see the prompt and themselves. With 8 samples of a 45-token prompt and 12-token responses a row has 133 tokens, not 448.

Which samples share is what the batch's plan says. It may be divided further where that is cheaper and computes no more
tokens than the plan's units, for the token budget counts on them; it is never extended. A micro-batch without a plan
shares whatever begins alike.

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

from headrace.engine.scheduling.prompt_sharing import row_cost
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
    prefix: npt.NDArray[np.int32]  # what may be shared; ends before the first loss token at the latest
    tokens: npt.NDArray[np.int32]  # from there up to, not including, the last loss token
    scored: Ints  # positions in the micro-batch
    source: Ints  # their predecessors' positions in prefix + tokens


_Unit = list[_Branch]  # branches of one prefix, laid out together


def lay_out(micro_batch: MicroBatch, *, hidden_size: int, mode: LayoutMode = "auto") -> RowLayout:
    """Choose the cheapest rows for a micro-batch.

    Args:
        micro_batch: The packed tokens.
        hidden_size: Of the model; weighs attention against the rest of a layer.
        mode: "plain" puts one sequence into each row, which every causal model keeps apart; "auto" may also share
            prompts and put several sequences into a row, which needs a model that honours a mask. "plain" computes each
            prompt anew, so there a plan's count is too low.
    """
    units = _units(micro_batch)
    if not units:
        return _nothing_scored(micro_batch)
    alone: list[list[_Unit]] = [[[branch]] for unit in units for branch in unit]
    if mode == "plain":
        return _fill(alone, masked=False)
    whole = _first_fit(units)
    limit = _num_tokens(whole) if micro_batch.shared else None
    best_rows, best_masked, best_cost = whole, True, _cost(whole, hidden_size, masked=True)
    ways = [(alone, False)] + [(_first_fit(divided), True) for divided in _divisions(units)]
    for rows, masked in ways:
        cost = _cost(rows, hidden_size, masked=masked)
        if cost < best_cost and (limit is None or _num_tokens(rows) <= limit):
            best_rows, best_masked, best_cost = rows, masked, cost
    return _fill(best_rows, masked=best_masked)


def _nothing_scored(micro_batch: MicroBatch) -> RowLayout:
    zero = np.zeros(1, dtype=np.int64)
    token = micro_batch.token_ids[:1].astype(np.int64)
    return RowLayout(token_ids=token[None], position_ids=zero[None], attention=None, source=zero, target=zero[:0])


def _units(micro_batch: MicroBatch) -> list[_Unit]:
    """Branches that share their prefix: those of a planned unit, else those that begin alike up to the loss."""
    planned = np.repeat(np.arange(len(micro_batch.shared)), micro_batch.shared)
    starts = np.flatnonzero(micro_batch.position_ids == 0)
    found: dict[int | bytes, list[tuple[npt.NDArray[np.int32], Ints, int]]] = {}
    for sequence, (start, end) in enumerate(zip(starts, [*starts[1:], micro_batch.token_ids.size], strict=True)):
        loss = np.flatnonzero(micro_batch.loss_mask[start:end])
        if loss.size == 0:
            continue
        assert loss[0] > 0, "the first token of a sequence has no score"
        tokens = micro_batch.token_ids[start:end]
        key = int(planned[sequence]) if micro_batch.shared else tokens[: loss[0]].tobytes()
        found.setdefault(key, []).append((tokens, loss, int(start)))
    return [_unit(members) for members in found.values()]


def _unit(members: Sequence[tuple[npt.NDArray[np.int32], Ints, int]]) -> _Unit:
    """The prefix is what all members begin with, up to the earliest loss token of any.

    A continuation that starts with masked tokens of its own so still shares the prompt with its siblings.
    """
    length = min(int(loss[0]) for _, loss, _ in members)
    first = members[0][0]
    for tokens, _, _ in members[1:]:
        differs = np.flatnonzero(tokens[:length] != first[:length])
        length = int(differs[0]) if differs.size else length
    return [
        _Branch(prefix=tokens[:length], tokens=tokens[length : loss[-1]], scored=loss + start, source=loss - 1)
        for tokens, loss, start in members
    ]


def _divisions(units: Sequence[_Unit]) -> list[list[_Unit]]:
    """Units of at most 1, 2, 4, ... branches, all narrower than `units`. Long responses are cheaper in small units."""
    most = max(len(unit) for unit in units)
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [[unit[i : i + size] for unit in units for i in range(0, len(unit), size)] for size in sizes or [1]]


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
    return row_cost(len(rows), _row_width(rows), hidden_size, masked=masked)


def _num_tokens(rows: Sequence[Sequence[_Unit]]) -> int:
    return len(rows) * _row_width(rows)


def _row_width(rows: Sequence[Sequence[_Unit]]) -> int:
    return max(sum(_width(unit) for unit in row) for row in rows)


def _fill(rows: Sequence[Sequence[_Unit]], *, masked: bool) -> RowLayout:
    width = _row_width(rows)
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
