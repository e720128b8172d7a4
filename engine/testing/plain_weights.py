"""Both ends of the weight chain on plain arrays: what a trainer publishes and what an engine serves, without either.

The receiver is as strict as an engine should be: it computes the digest of what it holds, and refuses what would lead
to another one.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from headrace.engine.errors import CorruptUpdateError, WeightUpdateError, WrongBaseError
from headrace.engine.types import AckStatus, PolicyVersion, TensorSpec, UpdateKind, WeightAck, WeightPart, WeightUpdate
from headrace.engine.weights.chain import check_base
from headrace.engine.weights.changes import check_change, read_change_file
from headrace.engine.weights.digest import DIGEST_MODULUS, state_digest
from headrace.engine.weights.layout import num_elements, raw_dtype
from headrace.engine.weights.payload import open_payload, verify_payload
from headrace.engine.weights.sender import HostBits, Shard, StagedPart, WeightSender
from headrace.engine.weights.ulp import RawArray

PLAIN_TENSORS = (
    TensorSpec(name="embed", dtype="bfloat16", shape=(40, 7)),
    TensorSpec(name="norm", dtype="float32", shape=(33,)),
    TensorSpec(name="scale", dtype="float16", shape=()),
)


def digest_of_state(state: Sequence[RawArray]) -> int:
    """The digest of flat tensors in the layout's order."""
    return sum(state_digest(index, 0, array) for index, array in enumerate(state)) % DIGEST_MODULUS


class PlainSender:
    """A trainer of one rank whose weights move at random. `state` may be written between two parts."""

    def __init__(
        self, seed: int, tensors: Sequence[TensorSpec] = PLAIN_TENSORS, *, run_id: str = "run", keyframe_steps: int = 25
    ) -> None:
        """Begin with random weights; the same seed gives the same ones."""
        self._rng = np.random.default_rng(seed)
        self._sender = WeightSender(tensors, run_id=run_id, rank=0, keyframe_steps=keyframe_steps, bits=HostBits())
        self._accepted: PolicyVersion | None = None
        self._staged: StagedPart[RawArray] | None = None
        self.tensors = tuple(tensors)
        self.state: list[RawArray] = [
            self._rng.integers(0, 1 << 8 * np.dtype(raw_dtype(spec.dtype)).itemsize, num_elements(spec)).astype(
                raw_dtype(spec.dtype)
            )
            for spec in tensors
        ]

    def step(self, fraction: float = 0.05) -> None:
        """Move about this fraction of all elements by a little, and one of them far."""
        for array in self.state:
            at = np.flatnonzero(self._rng.random(len(array)) < fraction)
            array[at] += self._rng.integers(1, 4, len(at)).astype(array.dtype)
        far = self.state[int(self._rng.integers(len(self.state)))]
        far[int(self._rng.integers(len(far)))] ^= far.dtype.type(1 << 12)

    def part(self, version: PolicyVersion, folder: Path, *, full: bool = False) -> WeightPart:
        """The update to `version`, full where it has to be or shall be; `settle` tells what became of it."""
        full = self._sender.needs_keyframe(version, self._accepted) or full
        shards = [
            Shard(tensor_index=index, runs=((0, len(array)),), elements=array.copy())
            for index, array in enumerate(self.state)
        ]
        self._staged = self._sender.stage(version, shards, full=full)
        return self._staged.write(folder)

    def settle(self, *, accepted: bool) -> None:
        """The hub has taken the last part, or refused it."""
        assert self._staged is not None
        if accepted:
            self._accepted = self._staged.version
        self._staged.settle(accepted=accepted)


class PlainReceiver:
    """An engine that holds its weights as flat arrays.

    Attributes:
        version: What it serves.
        state: The arrays, by tensor name; empty before the first whole state.
        applied: The kinds of the updates that it took, in order.
    """

    def __init__(self, version: PolicyVersion, tensors: Sequence[TensorSpec] = PLAIN_TENSORS) -> None:
        self.version = version
        self.digest = 0
        self.state: dict[str, RawArray] = {}
        self.applied: list[UpdateKind] = []
        self._tensors = tuple(tensors)
        self._staged: tuple[WeightUpdate, dict[str, RawArray]] | None = None

    def stage(self, update: WeightUpdate) -> WeightAck | None:
        """Prepare an update beside what is served; the answer if it is refused."""
        self._staged = None
        try:
            self._staged = update, self._prepared(update)
        except WrongBaseError as error:
            return self._ack(AckStatus.WRONG_BASE, str(error))
        except CorruptUpdateError as error:
            return self._ack(AckStatus.CORRUPT, str(error))
        except WeightUpdateError as error:
            return self._ack(AckStatus.UNKNOWN_LAYOUT, str(error))
        return None

    def apply(self) -> WeightAck:
        """Serve what was staged."""
        assert self._staged is not None, "nothing was staged"
        (update, self.state), self._staged = self._staged, None
        self.version, self.digest = update.manifest.version, update.manifest.digest
        self.applied.append(update.manifest.kind)
        return self._ack(AckStatus.SERVING)

    def take(self, update: WeightUpdate) -> WeightAck:
        """Stage and serve, or refuse."""
        return self.stage(update) or self.apply()

    def _prepared(self, update: WeightUpdate) -> dict[str, RawArray]:
        manifest = update.manifest
        if manifest.tensors != self._tensors:
            raise WeightUpdateError("the update has another layout than what is served")
        if manifest.kind is UpdateKind.KEYFRAME:
            verify_payload(update)
            state = {name: bits.reshape(-1).copy() for name, (_, bits) in open_payload(update).items()}
        else:
            check_base(self.version, manifest)
            state = self._changed(update)
        found = digest_of_state([state[spec.name] for spec in self._tensors])
        if found != manifest.digest:
            raise WrongBaseError(f"version {manifest.version} has the digest {found:016x} here; send a keyframe")
        return state

    def _changed(self, update: WeightUpdate) -> dict[str, RawArray]:
        table, changes = read_change_file(Path(update.local_path))
        if (table.version, table.digest) != (update.manifest.version, update.manifest.digest):
            raise CorruptUpdateError(f"{update.local_path} is not the change to version {update.manifest.version}")
        state = {name: bits.copy() for name, bits in self.state.items()}
        for change in changes:
            bits = state.get(change.name)
            if bits is None or bits.dtype.itemsize != change.values.itemsize:
                raise CorruptUpdateError(f"{change.name!r} is not served, or of another width")
            check_change(change, len(bits))
            if change.positions is None:
                bits[change.start : change.start + len(change.values)] = change.values
            else:
                bits[change.positions] = change.values
        return state

    def _ack(self, status: AckStatus, message: str = "") -> WeightAck:
        return WeightAck(version=self.version, status=status, digest=self.digest, message=message)


def as_update(part: WeightPart) -> WeightUpdate:
    """A part of a single rank as receivers see it once it is sealed."""
    return WeightUpdate(manifest=part.manifest, local_path=part.local_path)


def with_manifest(update: WeightUpdate, **changed: object) -> WeightUpdate:
    """The same payload under another manifest, for updates that lie."""
    return msgspec.structs.replace(update, manifest=msgspec.structs.replace(update.manifest, **changed))
