"""How old a sample is for the step that would train on it.

Step k (counted from 0) consumes the batch that turns version k into version k + 1, so an item of version v has lag
k - v when step k trains on it. Nothing here keeps state.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace.engine.errors import ConfigError, InputError
from headrace.engine.types import PolicyVersion, VersionSpan

Measure = Literal["oldest", "mean", "newest"]

# The version number of tokens whose weights are not in this run's past: older than anything.
LOST = -math.inf

FIRST = PolicyVersion(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LagRule:
    """The bound and what it is measured on.

    Attributes:
        max_staleness: Largest lag that is trained on; 0 is on-policy.
        weight_sync_steps: Versions are published whose number is a multiple of this, and the first one.
        measure: Which of a sample's tokens speaks for it.
        start: The version that this incarnation began with.
        ancestry: For each earlier incarnation, its last version that lies in this one's past. Later ones are lost.
    """

    max_staleness: int
    weight_sync_steps: int = 1
    measure: Measure = "oldest"
    start: PolicyVersion = FIRST
    ancestry: Mapping[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or self.weight_sync_steps < 1:
            raise ConfigError(
                f"max_staleness {self.max_staleness} with weight_sync_steps {self.weight_sync_steps} was given; "
                "the first must be at least 0 and the second at least 1"
            )
        if self.max_staleness < self.weight_sync_steps - 1:
            raise ConfigError(
                f"max_staleness {self.max_staleness} cannot hold with weight_sync_steps {self.weight_sync_steps}: set "
                f"max_staleness to at least {self.weight_sync_steps - 1} or publish more often"
            )

    def number(self, version: PolicyVersion) -> float:
        """The version's place in this run's past; `LOST` for weights of a future that a restart gave up."""
        if version.incarnation == self.start.incarnation:
            return float(version.version)
        last = self.ancestry.get(version.incarnation)
        return float(version.version) if last is not None and version.version <= last else LOST

    def measured(self, samples: Iterable[Sequence[VersionSpan]]) -> float:
        """The version number that a group counts as: that of its worst sample.

        Args:
            samples: The version spans of each sample of the group.

        Returns:
            The oldest, token-mean or newest version of each sample, and the smallest of these; `LOST` if any token is
            of a lost future.

        Raises:
            InputError: There is no sample, or a sample has no span.
        """
        numbers = [self._sample(spans) for spans in samples]
        if not numbers:
            raise InputError("a group without samples has no version; give the spans of at least one sample")
        return min(numbers)

    def _sample(self, spans: Sequence[VersionSpan]) -> float:
        numbers = [self.number(span.version) for span in spans]
        if not numbers:
            raise InputError("a sample without version spans has no version; stamp one span even if it has no token")
        oldest = min(numbers)
        if oldest == LOST or self.measure == "oldest":
            return oldest
        if self.measure == "newest":
            return max(numbers)
        total = sum(span.num_tokens for span in spans)
        if total == 0:
            return oldest
        # Whole numbers until the one division, so that a whole mean comes out whole.
        return sum(int(number) * span.num_tokens for number, span in zip(numbers, spans, strict=True)) / total

    def expiry(self, number: float) -> int:
        """The last step that may train on an item of this version number; -1 for a lost one."""
        return -1 if number == LOST else math.floor(number + self.max_staleness)

    def published_from(self, number: int) -> int:
        """The first version, from `number` on, that is published."""
        if number <= self.start.version:
            return self.start.version
        return -(-number // self.weight_sync_steps) * self.weight_sync_steps
