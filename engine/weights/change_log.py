"""Which elements changed since an older version: what a receiver that lags needs, as one change instead of a queue.

A step leads from one version to the next and names the elements that changed; the log keeps the newest steps, as gap
bytes (about one a changed element), and forgets the oldest beyond its limit. Values are not kept: whoever asks reads
them from the newest state, so any number of steps squashes into one, each element once.

Invariants:

1. The steps are a chain: each starts from the version that the one before it led to. The newest version is that of the
   state whose values complete the answer.
2. For a version that is known, `since` names every element whose bits differ from the newest version, and perhaps some
   that do not; for any other it names none.
3. At most `limit_bytes` are held, or a single step. Forgetting costs receivers a full update, never a wrong one.

Pure: no file, no clock.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.engine.errors import InputError
from headrace.engine.types import PolicyVersion
from headrace.engine.weights.gaps import Positions, decode_gaps, encode_gaps
from headrace.engine.weights.layout import BUCKET_ELEMENTS

# Where more than one element in so many changed, positions take more room than all values, and the range is given.
_DENSE_ABOVE_ONE_IN = 3

# Where more than one element in so many changed, a mask finds their union sooner than sorting does.
_MASK_ABOVE_ONE_IN = 64

# What a run and a step hold beside their bytes, about.
_OVERHEAD_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Touched:
    """Elements of one range of a tensor.

    Attributes:
        tensor_index: Position of the tensor in the layout.
        start: The range's first element in the flattened tensor.
        count: Elements of the range; it crosses no multiple of `BUCKET_ELEMENTS`.
        positions: Which of them, counted from `start`, strictly increasing; None for all.
    """

    tensor_index: int
    start: int
    count: int
    positions: Positions | None


@dataclass(frozen=True, slots=True)
class _Run:
    """A `Touched` as it is kept; no gaps for all elements."""

    start: int
    count: int
    num_positions: int
    gaps: npt.NDArray[np.uint8] | None

    def positions(self) -> Positions | None:
        return None if self.gaps is None else decode_gaps(self.gaps, self.num_positions, self.count)


# Runs by tensor and block, a block being BUCKET_ELEMENTS elements.
_Runs = dict[tuple[int, int], list[_Run]]


@dataclass(frozen=True, slots=True, eq=False)
class PackedStep:
    """What changed in one step, as it is kept. Made by `pack_step`, in whatever thread."""

    runs: _Runs
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Step:
    base: PolicyVersion
    packed: PackedStep


def pack_step(touched: Iterable[Touched]) -> PackedStep:
    """Encode the elements that changed; ranges do not overlap. Costs time by their number."""
    runs: _Runs = {}
    num_bytes = _OVERHEAD_BYTES
    for one in touched:
        if one.positions is not None and not len(one.positions):
            continue
        gaps = None if one.positions is None else encode_gaps(one.positions)
        run = _Run(one.start, one.count, one.count if one.positions is None else len(one.positions), gaps)
        runs.setdefault((one.tensor_index, one.start // BUCKET_ELEMENTS), []).append(run)
        num_bytes += _OVERHEAD_BYTES + (0 if gaps is None else gaps.nbytes)
    return PackedStep(runs, num_bytes)


class ChangeLog:
    """The newest steps of one state.

    Attributes:
        limit_bytes: Kept at most, about; counts from the next step on.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Nothing is known before `begin`."""
        self.limit_bytes = limit_bytes
        self._steps: deque[_Step] = deque()
        self._digests: dict[PolicyVersion, int] = {}
        self._newest: PolicyVersion | None = None
        self._num_bytes = 0

    @property
    def newest(self) -> PolicyVersion | None:
        """What the last step led to; None before `begin`."""
        return self._newest

    @property
    def num_bytes(self) -> int:
        """Held now."""
        return self._num_bytes

    def begin(self, version: PolicyVersion, digest: int) -> None:
        """A state appeared as a whole; what was known before is forgotten."""
        self._steps.clear()
        self._num_bytes = 0
        self._newest = version
        self._digests = {version: digest}

    def record(self, version: PolicyVersion, digest: int, touched: Iterable[Touched] | PackedStep) -> None:
        """Take a step from the newest version to `version`.

        Args:
            version: Newer than the newest, of the same incarnation.
            digest: Of its whole state.
            touched: The elements that changed; packed before where that would take too long here.

        Raises:
            InputError: The version does not follow the newest one.
        """
        newest = self._newest
        if newest is None or version.incarnation != newest.incarnation or version <= newest:
            raise InputError(f"a step to version {version} was given; it does not follow {newest}")
        packed = touched if isinstance(touched, PackedStep) else pack_step(touched)
        self._steps.append(_Step(newest, packed))
        self._num_bytes += packed.num_bytes
        self._newest = version
        self._digests[version] = digest
        while self._num_bytes > self.limit_bytes and len(self._steps) > 1:
            gone = self._steps.popleft()
            self._num_bytes -= gone.packed.num_bytes
            del self._digests[gone.base]

    def knows(self, version: PolicyVersion) -> bool:
        """Whether `since` has an answer."""
        return version in self._digests

    def digest_of(self, version: PolicyVersion) -> int | None:
        """The digest of a version that is known."""
        return self._digests.get(version)

    def since(self, version: PolicyVersion) -> Iterator[Touched]:
        """What changed from `version` to the newest one, by tensor and block, each element once.

        Raises:
            InputError: The version is not known.
        """
        if not self.knows(version):
            raise InputError(f"the changes since version {version} are not known; send the whole state")
        steps = [step for step in self._steps if step.base >= version]
        for tensor_index, block in sorted({key for step in steps for key in step.packed.runs}):
            runs = [run for step in steps for run in step.packed.runs.get((tensor_index, block), ())]
            yield _union(tensor_index, runs)


def _union(tensor_index: int, runs: list[_Run]) -> Touched:
    """All elements of runs of one block; a range from the first to the last run's end."""
    start = min(run.start for run in runs)
    count = max(run.start + run.count for run in runs) - start
    total = sum(run.num_positions for run in runs)
    if len(runs) == 1:
        positions = runs[0].positions()
    elif total * _MASK_ABOVE_ONE_IN > count or any(run.gaps is None for run in runs):
        positions = np.flatnonzero(_mask(runs, start, count))
    else:
        found = [_some(run) + (run.start - start) for run in runs]
        positions = np.unique(np.concatenate(found))
    if positions is not None and len(positions) * _DENSE_ABOVE_ONE_IN > count:
        positions = None
    return Touched(tensor_index=tensor_index, start=start, count=count, positions=positions)


def _mask(runs: list[_Run], start: int, count: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros(count, np.bool_)
    for run in runs:
        begin = run.start - start
        positions = run.positions()
        if positions is None:
            mask[begin : begin + run.count] = True
        else:
            mask[positions + begin] = True
    return mask


def _some(run: _Run) -> Positions:
    positions = run.positions()
    assert positions is not None
    return positions
