"""The chain of weight versions: which are sealed, and what a receiver needs to get to the newest.

Invariants:

1. A version exists once every rank's part of it has arrived and the parts prove to be a whole (`merge_manifests`).
   Until then nothing of it is handed out, and a publisher that dies leaves nothing behind.
2. Versions grow, within an incarnation and from one to the next. One version may be sealed in several forms (a
   keyframe, deltas from different bases), all with one digest: a version never means two different weights.
3. All parts of a version carry one fencing token. A part with an older token than any seen is refused; a newer one
   throws away what older ones had begun.
4. A delta's base is a version of this chain, of the same incarnation; for the first form of a version, not older than
   the newest keyframe. A new incarnation begins with a keyframe, and what the older ones sealed is then dropped.
5. The updates of the last `keep` versions are retained, and always the newest keyframe and everything after it. So
   there is a way to the newest version from nothing, and from each base of a retained delta. A delta that is older than
   the newest keyframe serves only those who hold its base.

Pure: payloads, sockets and time live elsewhere.
"""

from dataclasses import dataclass, field

from headrace.engine.errors import (
    CorruptUpdateError,
    FencedError,
    InputError,
    WeightUpdateError,
    WrongBaseError,
)
from headrace.engine.types import PolicyVersion, UpdateKind, WeightManifest
from headrace.engine.weights.manifest import merge_manifests

# A sealed form of a version: the version and the base that it starts from.
_Form = tuple[PolicyVersion, PolicyVersion | None]


def check_base(have: PolicyVersion | None, manifest: WeightManifest) -> None:
    """Refuse a delta against a version that the receiver does not hold; a keyframe is always good.

    Raises:
        WrongBaseError: The update is a delta and its base is not `have`.
    """
    if manifest.kind is UpdateKind.DELTA and manifest.base != have:
        raise WrongBaseError(
            f"update {manifest.version} starts from version {manifest.base}, but the receiver holds "
            f"{'nothing' if have is None else have}; ask for a keyframe"
        )


@dataclass(slots=True)
class _Pending:
    token: int
    parts: dict[int, WeightManifest] = field(default_factory=dict[int, WeightManifest])


@dataclass(slots=True)
class _Sealed:
    manifest: WeightManifest
    part_digests: tuple[int, ...]  # by rank


class VersionChain:
    """Collects parts into versions and tells receivers what to take next.

    Args:
        run_id: Parts of another run are refused.
        num_ranks: Ranks that publish a part each (replicas publish once).
        keep: Versions whose updates are retained at least.
        root: The version that receivers load by themselves (the initial checkpoint); the first delta may start from it.
    """

    def __init__(self, run_id: str, num_ranks: int, keep: int = 8, root: PolicyVersion | None = None) -> None:
        if num_ranks < 1 or keep < 1:
            raise InputError(f"num_ranks {num_ranks} and keep {keep} were given; both must be at least 1")
        self.run_id = run_id
        self.num_ranks = num_ranks
        self.keep = keep
        self._root = root
        self._newest = root
        self._token = 0
        self._pending: dict[_Form, _Pending] = {}
        self._sealed: dict[_Form, _Sealed] = {}

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest sealed version, or the root; None before there is any."""
        return self._newest

    @property
    def digest(self) -> int | None:
        """Of the newest sealed version; None before the first."""
        return next((held.manifest.digest for form, held in self._sealed.items() if form[0] == self._newest), None)

    @property
    def versions_since_keyframe(self) -> int:
        """Retained versions newer than the newest keyframe; the publisher sends a keyframe when there are many."""
        keyframe = self._newest_keyframe()
        return len({version for version, _ in self._sealed if keyframe is None or version > keyframe})

    def retained(self) -> list[WeightManifest]:
        """Every update that can be handed out, oldest version first. Other payloads may be removed."""
        return [self._sealed[form].manifest for form in self._in_order()]

    def digest_of(self, version: PolicyVersion) -> int | None:
        """The digest of a retained version."""
        return next((held.manifest.digest for form, held in self._sealed.items() if form[0] == version), None)

    def missing_ranks(self) -> dict[PolicyVersion, tuple[int, ...]]:
        """For each version that has begun, the ranks whose parts are awaited."""
        return {
            form[0]: tuple(rank for rank in range(self.num_ranks) if rank not in pending.parts)
            for form, pending in self._pending.items()
        }

    def offer_part(self, rank: int, manifest: WeightManifest, token: int) -> WeightManifest | None:
        """Take one rank's part. The same part may be offered again.

        Args:
            rank: 0..num_ranks-1.
            manifest: The rank's own buckets.
            token: The fencing token of the lease under which the version was trained.

        Returns:
            The whole update, if it is sealed by this part or was before; None while other ranks' parts are awaited.

        Raises:
            InputError: The rank or the run is not one of this chain.
            FencedError: A newer token or a newer incarnation has published.
            WrongBaseError: The base of a delta is not on this chain, or a new incarnation begins without a keyframe.
            WeightUpdateError: A newer version is sealed.
            CorruptUpdateError: The part differs from what this rank offered before, or the parts together are not a
                whole, or not the weights that are known under this version. Nothing remains of them.
        """
        self._admit(rank, manifest, token)
        form = (manifest.version, manifest.base)
        sealed = self._sealed.get(form)
        if sealed is not None:
            if sealed.part_digests[rank] != manifest.digest:
                raise CorruptUpdateError(f"rank {rank} offers other weights for the sealed version {manifest.version}")
            return sealed.manifest
        pending = self._pending.setdefault(form, _Pending(token))
        if pending.parts.setdefault(rank, manifest) != manifest:
            raise CorruptUpdateError(
                f"rank {rank} offers another part of version {manifest.version} than before; abandon the version first"
            )
        if len(pending.parts) < self.num_ranks:
            return None
        del self._pending[form]
        return self._seal(form, [pending.parts[number] for number in range(self.num_ranks)])

    def is_sealed(self, manifest: WeightManifest) -> bool:
        """Whether all parts of this update have been taken."""
        return (manifest.version, manifest.base) in self._sealed

    def would_seal(self, rank: int, manifest: WeightManifest, token: int) -> bool:
        """Whether this part is the last that its update waits for; it may still be refused."""
        pending = self._pending.get((manifest.version, manifest.base))
        there = set(pending.parts) if pending is not None and token == self._token else set[int]()
        return len(there | {rank}) == self.num_ranks

    def abandon(self, version: PolicyVersion) -> list[int]:
        """Forget the parts of a version that is not sealed (a rank died); returns the ranks that may offer again."""
        ranks: set[int] = set()
        for form in [form for form in self._pending if form[0] == version]:
            ranks.update(self._pending.pop(form).parts)
        return sorted(ranks)

    def what_next(self, have: PolicyVersion | None) -> list[WeightManifest]:
        """The updates that take a receiver to the newest version, in order: the fewest bytes that do it.

        Args:
            have: What the receiver holds; None for nothing, or for a state that is not to be built upon.

        Returns:
            Deltas from `have`, or the newest keyframe and the deltas after it; empty if there is nothing to do. A
            version that is not on this chain (of a lost incarnation, or from before the window) counts as nothing.

        Raises:
            WrongBaseError: There is no way, because no keyframe was ever published; publish one.
        """
        if not self._sealed or have == self._newest:
            return []
        keyframe = self._newest_keyframe()
        # Cheapest way to each version, as (bytes, updates); one pass will do, for every update goes forward.
        ways: dict[PolicyVersion, tuple[int, list[WeightManifest]]] = {}
        if have is not None:
            ways[have] = (0, [])
        for version, base in self._in_order():
            manifest = self._sealed[version, base].manifest
            if base is None:
                start: tuple[int, list[WeightManifest]] | None = (0, []) if version == keyframe else None
            else:
                start = ways.get(base)
            if start is None:
                continue
            way = (start[0] + manifest.payload_bytes, [*start[1], manifest])
            known = ways.get(version)
            if known is None or (way[0], len(way[1])) < (known[0], len(known[1])):
                ways[version] = way
        assert self._newest is not None
        found = ways.get(self._newest)
        if found is None:
            raise WrongBaseError(
                f"there is no way from {'nothing' if have is None else f'version {have}'} to version {self._newest} "
                "without a keyframe; publish one"
            )
        return found[1]

    def keyframe_after(self, have: PolicyVersion | None) -> WeightManifest | None:
        """The newest keyframe, for a receiver that takes no deltas; None if it is no newer than what it has."""
        keyframe = self._newest_keyframe()
        if keyframe is None or (have is not None and keyframe <= have):
            return None
        return self._sealed[keyframe, None].manifest

    def _admit(self, rank: int, manifest: WeightManifest, token: int) -> None:
        if not 0 <= rank < self.num_ranks or manifest.run_id != self.run_id:
            raise InputError(
                f"rank {rank} of run {manifest.run_id!r} offers a part; this chain is that of run {self.run_id!r} "
                f"with {self.num_ranks} ranks"
            )
        if token < self._token:
            raise FencedError(
                f"rank {rank} publishes version {manifest.version} with token {token}, but {self._token} is current; "
                "its lease was taken over, so it must stop"
            )
        version, newest = manifest.version, self._newest
        if newest is not None and version.incarnation < newest.incarnation:
            raise FencedError(
                f"version {version} is of an incarnation that was given up; {newest} is the newest version"
            )
        if newest is not None and version < newest:
            raise WeightUpdateError(f"version {version} was offered, but {newest} is sealed; publish a newer one")
        if manifest.kind is UpdateKind.DELTA and (
            manifest.base not in self._bases(version) or manifest.base == version
        ):
            raise WrongBaseError(
                f"the delta to version {version} starts from {manifest.base}, which this chain does not hold from its "
                "newest keyframe on; start from the newest sealed version of this incarnation or publish a keyframe"
            )
        if token > self._token:
            self._token = token
            self._pending.clear()

    def _bases(self, version: PolicyVersion) -> set[PolicyVersion]:
        """Versions that a delta to `version` may start from."""
        known = {sealed for sealed, _ in self._sealed}
        if self._root is not None:
            known.add(self._root)
        keyframe = self._newest_keyframe()
        if keyframe is not None and version not in known:
            # The first way to a version must be one from the newest keyframe; shortcuts may follow.
            known = {base for base in known if base >= keyframe}
        return {base for base in known if base.incarnation == version.incarnation}

    def _seal(self, form: _Form, parts: list[WeightManifest]) -> WeightManifest:
        manifest = merge_manifests(parts)
        known = self.digest_of(manifest.version)
        if known is not None and known != manifest.digest:
            raise CorruptUpdateError(
                f"version {manifest.version} has the digest {known:016x}, and is offered with {manifest.digest:016x}; "
                "other weights need another version"
            )
        self._sealed[form] = _Sealed(manifest, tuple(part.digest for part in parts))
        self._newest = manifest.version
        self._pending = {other: pending for other, pending in self._pending.items() if other[0] >= manifest.version}
        self._retire()
        return manifest

    def _retire(self) -> None:
        """Drop what is before both the window and the newest keyframe, and all of older incarnations."""
        assert self._newest is not None
        incarnation = self._newest.incarnation
        versions = sorted({version for version, _ in self._sealed if version.incarnation == incarnation})
        first = versions[-min(self.keep, len(versions))]
        keyframe = self._newest_keyframe()
        # Without a keyframe all deltas hang on the root, and none can go.
        first = versions[0] if keyframe is None else min(first, keyframe)
        self._sealed = {form: held for form, held in self._sealed.items() if form[0] >= first}

    def _newest_keyframe(self) -> PolicyVersion | None:
        return max((version for version, base in self._sealed if base is None), default=None)

    def _in_order(self) -> list[_Form]:
        return sorted(self._sealed, key=lambda form: (form[0], form[1] is not None, form[1] or form[0]))
