"""Changes of a keyframe's state as an engine gets them from its host's agent: change files."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from headrace.engine.testing.plain_weights import digest_of_state
from headrace.engine.types import PolicyVersion, UpdateKind, WeightManifest, WeightUpdate
from headrace.engine.weights.changes import WeightChange, write_changes
from headrace.engine.weights.payload import KeyframeWriter, open_payload
from headrace.engine.weights.ulp import RawArray

State = Sequence[RawArray]


def state_of(keyframe: WeightUpdate) -> list[RawArray]:
    """A keyframe's bits, flat, by tensor."""
    return [bits.reshape(-1).copy() for _, bits in open_payload(keyframe).values()]


def flipped_signs(state: State, *, share: float = 0.05, seed: int = 0) -> list[RawArray]:
    """The state with other signs at random places, at least one a tensor; finite numbers stay finite."""
    rng = np.random.default_rng(seed)
    found: list[RawArray] = []
    for bits in state:
        chosen = rng.random(len(bits)) < share
        chosen[:1] = True
        sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
        found.append(np.where(chosen, bits ^ sign, bits).astype(bits.dtype))
    return found


def make_change_update(
    base: WeightUpdate, state: State, version: PolicyVersion, path: Path, *, before: State | None = None
) -> WeightUpdate:
    """A delta from `base` to `state`, with its change file at `path`; of the first tensor all elements are given.

    Args:
        base: What it starts from: a keyframe, or a delta whose state is given as `before`.
        state: Bits of all tensors, flat.
        version: What it leads to.
        before: The base's state; by default read from its payload.
    """
    old = state_of(base) if before is None else before
    manifest, digest = base.manifest, digest_of_state(state)
    run_id, start = manifest.run_id, manifest.version
    names = [spec.name for spec in manifest.tensors]
    write_changes(path, _changes(names, old, state), digest=digest, run_id=run_id, base=start, version=version)
    return WeightUpdate(
        manifest=WeightManifest(
            run_id=run_id,
            version=version,
            base=start,
            kind=UpdateKind.DELTA,
            layout_hash=manifest.layout_hash,
            tensors=manifest.tensors,
            buckets=(),
            payload_bytes=path.stat().st_size,
            digest=digest,
        ),
        local_path=str(path),
    )


def make_keyframe(base: WeightUpdate, state: State, version: PolicyVersion, path: Path) -> WeightUpdate:
    """A keyframe of `state`, in the layout of `base`."""
    tensors = base.manifest.tensors
    with KeyframeWriter(path, tensors, run_id=base.manifest.run_id, version=version) as writer:
        for index, bits in enumerate(state):
            writer.write(index, 0, bits)
        return WeightUpdate(manifest=writer.manifest(), local_path=str(path))


def damaged_copy(update: WeightUpdate, path: Path) -> WeightUpdate:
    """The same update with another bit in the middle of its file."""
    data = bytearray(Path(update.local_path).read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return msgspec.structs.replace(update, local_path=str(path))


def _changes(names: Sequence[str], old: State, new: State) -> Iterator[WeightChange]:
    for index, (name, before, after) in enumerate(zip(names, old, new, strict=True)):
        if index == 0:
            yield WeightChange(name=name, values=after)
            continue
        positions = np.flatnonzero(before != after).astype(np.int32)
        yield WeightChange(name=name, positions=positions, values=after[positions])
