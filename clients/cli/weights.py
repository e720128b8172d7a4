"""`headrace weights inspect|verify|diff`: what is in a change file or a checkpoint, and what differs between two."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from headrace.clients.cli.weights_state import Changes, Checkpoint, open_weights
from headrace.engine.errors import CorruptUpdateError, UsageError
from headrace.engine.types import TensorSpec
from headrace.engine.weights.changes import WeightChange, check_change
from headrace.engine.weights.layout import num_elements
from headrace.engine.weights.ulp import RawArray, order

# Compared at once.
_BLOCK = 4 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="inspect|verify|diff", required=True)
    inspect = actions.add_parser("inspect", help="print what a change file or a checkpoint holds")
    verify = actions.add_parser("verify", help="check checksums, sizes and positions")
    diff = actions.add_parser("diff", help="print what differs, bit for bit; exit code 1 if anything does")
    for action in (inspect, verify):
        action.add_argument("path", type=Path, metavar="PATH", help="a change file, .safetensors file or folder")
    verify.add_argument("--against", type=Path, metavar="CHECKPOINT", help="also: do the changes fit these tensors?")
    diff.add_argument("before", type=Path, metavar="A", help="a checkpoint")
    diff.add_argument("after", type=Path, metavar="B", help="a checkpoint, or a change file: is it applied in A?")


def run(args: argparse.Namespace) -> int:
    """Run the action; 0, or 1 where `diff` has found a difference.

    Raises:
        UsageError: A path holds nothing that is known, or not what the action needs.
        CorruptUpdateError: A change file is damaged, or does not fit the checkpoint.
        FormatError: A safetensors file is not what the format says.
    """
    match args.action:
        case "inspect":
            _inspect(open_weights(args.path))
            return 0
        case "verify":
            _verify(args.path, args.against)
            return 0
        case _:
            return _diff(_checkpoint(args.before), open_weights(args.after))


def _checkpoint(path: Path) -> Checkpoint:
    found = open_weights(path)
    if isinstance(found, Changes):
        raise UsageError(f"{path} is a change file; give a checkpoint here")
    return found


def _inspect(found: Checkpoint | Changes) -> None:
    if isinstance(found, Checkpoint):
        for name, (spec, bits) in found.tensors.items():
            print(f"{name}  {spec.dtype}  {'x'.join(map(str, spec.shape)) or 'scalar'}  {bits.nbytes:,} bytes")
        total = sum(bits.nbytes for _, bits in found.tensors.values())
        print(f"{len(found.tensors)} tensors, {found.num_elements:,} elements, {total:,} bytes")
        return
    table = found.table
    for change in found.changes:
        where = f"from {change.start:,} on" if change.positions is None else "at positions"
        print(f"{change.name}  {len(change.values):,} elements {where}")
    total = sum(len(change.values) for change in found.changes)
    print(
        f"change of run {table.run_id!r} from version {table.base} to {table.version}: {total:,} elements of "
        f"{len({change.name for change in found.changes})} tensors, {found.path.stat().st_size:,} bytes, "
        f"digest {table.digest:016x}"
    )


def _verify(path: Path, against: Path | None) -> None:
    found = open_weights(path)
    if isinstance(found, Changes):
        specs = {} if against is None else {name: spec for name, (spec, _) in _checkpoint(against).tensors.items()}
        for change in found.changes:
            if against is not None and change.name not in specs:
                raise CorruptUpdateError(f"{path} changes {change.name!r}, which {against} does not have")
            check_change(change, _size(change) if against is None else num_elements(specs[change.name]))
    print(f"{path}: ok")


def _size(change: WeightChange) -> int:
    """The smallest tensor that a change may belong to."""
    if change.positions is None:
        return change.start + len(change.values)
    return int(change.positions[-1]) + 1 if len(change.positions) else 0


def _diff(before: Checkpoint, after: Checkpoint | Changes) -> int:
    lines = list(_changed(before, after) if isinstance(after, Changes) else _compared(before, after))
    for line in lines:
        print(line)
    if not lines:
        print("no difference")
    return 1 if lines else 0


def _compared(before: Checkpoint, after: Checkpoint) -> Iterator[str]:
    for name in sorted(before.tensors.keys() ^ after.tensors.keys()):
        yield f"{name}  only in {before.path if name in before.tensors else after.path}"
    total = 0
    for name in sorted(before.tensors.keys() & after.tensors.keys()):
        (old_spec, old), (new_spec, new) = before.tensors[name], after.tensors[name]
        if old_spec != new_spec:
            yield f"{name}  {_kind(old_spec)} and {_kind(new_spec)}"
            continue
        changed, furthest = _difference(old, new)
        total += changed
        if changed:
            yield f"{name}  {changed:,} of {len(old):,} elements differ, by {furthest:,} ulp at most"
    if total:
        yield f"{total:,} of {before.num_elements:,} elements differ ({total / before.num_elements:.3%})"


def _changed(before: Checkpoint, after: Changes) -> Iterator[str]:
    for change in after.changes:
        if change.name not in before.tensors:
            yield f"{change.name}  only in {after.path}"
            continue
        bits = before.tensors[change.name][1]
        check_change(change, len(bits))
        end = change.start + len(change.values)
        old = bits[change.start : end] if change.positions is None else bits[change.positions]
        if old.dtype.itemsize != change.values.dtype.itemsize:
            yield f"{change.name}  of another width in {after.path}"
            continue
        changed, furthest = _difference(old, change.values)
        if changed:
            yield f"{change.name}  {changed:,} of {len(old):,} changes are not there, by {furthest:,} ulp at most"


def _difference(old: RawArray, new: RawArray) -> tuple[int, int]:
    """How many elements differ, and the largest step between two."""
    changed = furthest = 0
    for begin in range(0, len(old), _BLOCK):
        a, b = old[begin : begin + _BLOCK], new[begin : begin + _BLOCK]
        at = np.flatnonzero(a != b)
        if len(at):
            changed += len(at)
            steps = order(b[at]).astype(np.int64) - order(a[at]).astype(np.int64)
            furthest = max(furthest, int(np.abs(steps).max()))
    return changed, furthest


def _kind(spec: TensorSpec) -> str:
    return f"{spec.dtype} {'x'.join(map(str, spec.shape)) or 'scalar'}"
