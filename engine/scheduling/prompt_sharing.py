"""Which records of a batch share one copy of their prompt, and what a row of tokens costs.

A *sharing unit* is laid out as one prompt followed by the responses of its records, each a branch that sees the prompt
and itself. Its tokens are the prompt's, once, and those of the responses.

Invariants:
- Records of a unit belong to one group and have prompts of one length.
- A unit of several records is not wider than the width that was asked for.
- No two units of a group on a rank fit together into one, so a micro-batch holds no needless copy of a prompt.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.engine.scheduling.best_fit import best_fit

# A rank that has at most this much more than the mean is not worth another copy of a prompt.
_LEVEL = 1.01
_MOVES_A_RANK = 8
# Another copy has to shorten the fullest rank by at least a quarter of its own tokens.
_SAVED_A_COPY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanItem:
    """One record of the batch.

    Attributes:
        num_tokens: Prompt and response; at least 1.
        num_loss_tokens: Sum of the loss mask; 0 is allowed.
        num_prompt_tokens: Tokens of the prompt, which all records of a group have in common; needed to share it. With 0
            there is nothing to share.
    """

    record_id: str
    group_id: str
    num_tokens: int
    num_loss_tokens: int
    num_prompt_tokens: int = 0


class Unit(NamedTuple):
    """Records that share one copy of their prompt.

    Attributes:
        indices: Positions in the batch, ascending.
        tokens: What is computed for them.
    """

    indices: tuple[int, ...]
    tokens: int


def row_cost(num_rows: int, width: int, hidden_size: int, *, masked: bool) -> int:
    """Relative arithmetic of a pass over rows of tokens: a layer's matrices (about 12 H² weights) and its attention.

    Args:
        num_rows: Rows.
        width: Tokens of each row, padding included.
        hidden_size: H of the model.
        masked: The rows need a mask; a plain causal kernel skips the upper half of the attention.
    """
    attention = 2 * width if masked else width
    return num_rows * width * (6 * hidden_size + attention)


class PromptSharing:
    """Cuts groups into sharing units.

    Args:
        items: The batch.
        token_budget: Most tokens of a unit.
        hidden_size: Of the model: a unit is then also no wider than pays, for attention grows with the square of its
            width. None: as wide as the budget allows.
    """

    def __init__(self, items: Sequence[PlanItem], token_budget: int, hidden_size: int | None) -> None:
        self._items = items
        self._budget = token_budget
        self._hidden_size = hidden_size
        self._widths: dict[tuple[str, int], int] = {}

    def cut(self, indices: Iterable[int]) -> list[Unit]:
        """Records of any groups to units: as few a group as best fit finds."""
        units: list[Unit] = []
        for (group_id, prompt), members in self._by_prompt(indices).items():
            responses = [self._items[index].num_tokens - prompt for index in members]
            width = self._widths.setdefault((group_id, prompt), self._width(prompt, responses))
            for positions in best_fit(responses, width - prompt):
                tokens = prompt + sum(responses[position] for position in positions)
                units.append(Unit(tuple(members[position] for position in sorted(positions)), tokens))
        return units

    def level(self, shares: list[list[Unit]]) -> list[list[Unit]]:
        """Let the fullest rank give records of a group to the emptiest, at the price of another copy of the prompt.

        With fewer groups than ranks some ranks would have nothing to do. Stops where the fullest rank is within 1% of
        the mean, or where another copy would save too little.
        """
        loads = [sum(unit.tokens for unit in share) for share in shares]
        shares = [list(share) for share in shares]
        moved = False
        for _ in range(_MOVES_A_RANK * len(shares)):
            full, empty = loads.index(max(loads)), loads.index(min(loads))
            if loads[full] * len(loads) <= _LEVEL * sum(loads):
                break
            move = self._best_move(shares[full], loads[full], loads[empty])
            if move is None:
                break
            place, given = move
            unit = shares[full][place]
            kept = tuple(index for index in unit.indices if index not in given)
            shares[full][place] = self._unit(kept)
            shares[empty].append(self._unit(given))
            loads[full] += shares[full][place].tokens - unit.tokens
            loads[empty] += shares[empty][-1].tokens
            moved = True
        if not moved:
            return shares
        # What a rank now holds of a group may fit together again.
        return [self.cut(sorted(index for unit in share for index in unit.indices)) for share in shares]

    def _by_prompt(self, indices: Iterable[int]) -> dict[tuple[str, int], list[int]]:
        found: dict[tuple[str, int], list[int]] = {}
        for index in indices:
            item = self._items[index]
            found.setdefault((item.group_id, item.num_prompt_tokens), []).append(index)
        return found

    def _width(self, prompt: int, responses: Sequence[int]) -> int:
        """The widest unit of a group that pays, by the cost of 1, 2, 4, ... responses of mean length together."""
        if prompt == 0:
            return 0  # there is nothing to share
        if self._hidden_size is None:
            return self._budget
        num, mean = len(responses), sum(responses) / len(responses)
        best, best_cost = 0, row_cost(num, prompt + round(mean), self._hidden_size, masked=False)
        together = 2
        while together < 2 * num:
            size = min(together, num)
            width = prompt + round(size * mean)
            cost = row_cost(-(-num // size), width, self._hidden_size, masked=True)
            if cost < best_cost:
                best, best_cost = width, cost
            together *= 2
        return min(best, self._budget)

    def _unit(self, indices: tuple[int, ...]) -> Unit:
        prompt = self._items[indices[0]].num_prompt_tokens
        return Unit(indices, prompt + sum(self._items[index].num_tokens - prompt for index in indices))

    def _best_move(self, share: Sequence[Unit], full: int, empty: int) -> tuple[int, tuple[int, ...]] | None:
        """The unit to divide and the records to give away, for the least load of the two ranks; None if none helps."""
        best: tuple[int, tuple[int, ...]] | None = None
        best_load = full
        for place, unit in enumerate(share):
            prompt = self._items[unit.indices[0]].num_prompt_tokens
            given, tokens = self._half(unit, (full - empty - prompt) // 2)
            load = max(full - tokens, empty + prompt + tokens)
            if given and load < best_load and prompt <= _SAVED_A_COPY * (full - load):
                best, best_load = (place, given), load
        return best

    def _half(self, unit: Unit, goal: int) -> tuple[tuple[int, ...], int]:
        """Records of a unit with about `goal` response tokens, never all of them, and their response tokens."""
        if len(unit.indices) == 1 or goal <= 0:
            return (), 0
        items = self._items
        sizes = {index: items[index].num_tokens - items[index].num_prompt_tokens for index in unit.indices}
        longest_first = sorted(unit.indices, key=lambda index: (-sizes[index], index))
        given: list[int] = []
        tokens = 0
        for index in longest_first:
            if tokens + sizes[index] <= goal and len(given) < len(sizes) - 1:
                given.append(index)
                tokens += sizes[index]
        if not given:  # even the shortest is more than half the difference; it may help all the same
            given, tokens = [longest_first[-1]], sizes[longest_first[-1]]
        return tuple(sorted(given)), tokens
