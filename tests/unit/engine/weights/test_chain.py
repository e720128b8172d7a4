import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import (
    CorruptUpdateError,
    FencedError,
    InputError,
    WeightUpdateError,
    WrongBaseError,
)
from headrace.engine.types import (
    BucketEncoding,
    PolicyVersion,
    TensorSpec,
    UpdateKind,
    WeightBucket,
    WeightManifest,
)
from headrace.engine.weights.chain import VersionChain, check_base
from headrace.engine.weights.layout import layout_hash
from headrace.engine.weights.manifest import digest_of

TENSORS = (TensorSpec(name="w", dtype="bfloat16", shape=(8,)),)


def v(number: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion(incarnation, number)


def part(
    version: PolicyVersion, base: PolicyVersion | None, rank: int = 0, ranks: int = 1, weights: int | None = None
) -> WeightManifest:
    """One rank's share; `weights` stands for the content and follows from the version unless given."""
    count = 8 // ranks
    content = hash(version) if weights is None else weights
    size = 10 if base is None else 2
    buckets = (
        WeightBucket(
            tensor_index=0,
            start=rank * count,
            count=count,
            encoding=BucketEncoding.DENSE if base is None else BucketEncoding.GAP_ULP,
            payload_offset=0,
            payload_bytes=size,
            payload_checksum=0,
            state_checksum=(content + rank) % 2**64,
        ),
    )
    return WeightManifest(
        run_id="run",
        version=version,
        base=base,
        kind=UpdateKind.KEYFRAME if base is None else UpdateKind.DELTA,
        layout_hash=layout_hash(TENSORS),
        tensors=TENSORS,
        buckets=buckets,
        payload_bytes=size,
        digest=digest_of(buckets),
    )


def publish(chain: VersionChain, version: PolicyVersion, base: PolicyVersion | None, token: int = 1) -> None:
    for rank in range(chain.num_ranks):
        update = chain.offer_part(rank, part(version, base, rank, chain.num_ranks), token)
    assert update is not None and chain.newest == version


def path(chain: VersionChain, have: PolicyVersion | None) -> list[tuple[PolicyVersion | None, PolicyVersion]]:
    return [(manifest.base, manifest.version) for manifest in chain.what_next(have)]


def test_a_version_exists_when_all_ranks_have_brought_their_parts() -> None:
    chain = VersionChain("run", 2)
    assert chain.offer_part(1, part(v(1), None, 1, 2), 1) is None
    assert chain.newest is None and chain.what_next(None) == []
    assert chain.missing_ranks() == {v(1): (0,)}
    update = chain.offer_part(0, part(v(1), None, 0, 2), 1)
    assert update is not None and len(update.buckets) == 2
    assert chain.newest == v(1) and chain.digest == update.digest and chain.missing_ranks() == {}


def test_offering_the_same_part_again_changes_nothing_before_and_after_the_seal() -> None:
    chain = VersionChain("run", 2)
    first, second = part(v(1), None, 0, 2), part(v(1), None, 1, 2)
    assert chain.offer_part(0, first, 1) is None
    assert chain.offer_part(0, first, 1) is None
    update = chain.offer_part(1, second, 1)
    assert chain.offer_part(0, first, 1) == update
    with pytest.raises(CorruptUpdateError, match="other weights"):
        chain.offer_part(0, part(v(1), None, 0, 2, weights=5), 1)


def test_a_rank_that_dies_in_mid_publish_leaves_no_version_and_may_start_again() -> None:
    chain = VersionChain("run", 2)
    publish(chain, v(1), None)
    chain.offer_part(0, part(v(2), v(1), 0, 2), 1)
    with pytest.raises(CorruptUpdateError, match="abandon the version"):
        chain.offer_part(0, part(v(2), v(1), 0, 2, weights=9), 1)
    assert chain.abandon(v(2)) == [0]
    assert chain.newest == v(1) and chain.what_next(v(1)) == []
    publish(chain, v(2), v(1))


def test_parts_under_different_tokens_are_never_joined() -> None:
    chain = VersionChain("run", 2)
    chain.offer_part(0, part(v(1), None, 0, 2), 1)
    assert chain.offer_part(1, part(v(1), None, 1, 2), 2) is None  # the successor's; rank 0's zombie is forgotten
    with pytest.raises(FencedError, match="token 1"):
        chain.offer_part(0, part(v(1), None, 0, 2), 1)
    assert chain.offer_part(0, part(v(1), None, 0, 2), 2) is not None


def test_versions_only_grow_and_one_version_has_one_state() -> None:
    chain = VersionChain("run", 1)
    publish(chain, v(1), None)
    publish(chain, v(2), v(1))
    with pytest.raises(WeightUpdateError, match="is sealed"):
        chain.offer_part(0, part(v(1), None), 1)
    with pytest.raises(CorruptUpdateError, match="another version"):
        chain.offer_part(0, part(v(2), None, weights=3), 1)
    publish(chain, v(2), None)  # the same state as a keyframe
    assert path(chain, v(1)) == [(v(1), v(2))] and path(chain, None) == [(None, v(2))]


def test_parts_that_are_not_a_whole_leave_nothing() -> None:
    chain = VersionChain("run", 2)
    chain.offer_part(0, part(v(1), None, 0, 2), 1)
    with pytest.raises(CorruptUpdateError, match="overlap"):
        chain.offer_part(1, part(v(1), None, 0, 2), 1)
    assert chain.newest is None and chain.missing_ranks() == {}
    publish(chain, v(1), None)


def test_strangers_are_refused() -> None:
    with pytest.raises(InputError, match="this chain is that of run 'mine'"):
        VersionChain("mine", 1).offer_part(0, part(v(1), None), 1)
    with pytest.raises(InputError, match="with 1 ranks"):
        VersionChain("run", 1).offer_part(1, part(v(1), None), 1)
    with pytest.raises(InputError):
        VersionChain("run", 0)


def test_a_receiver_takes_the_newest_keyframe_and_the_deltas_after_it_or_just_the_deltas() -> None:
    chain = VersionChain("run", 1, keep=10)
    publish(chain, v(1), None)
    for number in (2, 3, 4):
        publish(chain, v(number), v(number - 1))
    publish(chain, v(4), None)
    publish(chain, v(5), v(4))
    assert path(chain, None) == [(None, v(4)), (v(4), v(5))]
    assert path(chain, v(3)) == [(v(3), v(4)), (v(4), v(5))]
    assert path(chain, v(5)) == []
    publish(chain, v(5), v(2))  # squashed
    assert path(chain, v(2)) == [(v(2), v(5))]
    assert chain.versions_since_keyframe == 1


def test_a_chain_of_deltas_that_outweighs_the_keyframe_is_not_taken() -> None:
    chain = VersionChain("run", 1, keep=20)
    publish(chain, v(0), None)
    for number in range(1, 8):
        publish(chain, v(number), v(number - 1))
    publish(chain, v(7), None)
    assert path(chain, v(0)) == [(None, v(7))]  # 10 bytes, not 14
    assert len(path(chain, v(3))) == 4


def test_a_receiver_of_a_lost_incarnation_gets_a_keyframe() -> None:
    chain = VersionChain("run", 1)
    publish(chain, v(8), None)
    publish(chain, v(9), v(8))
    with pytest.raises(WrongBaseError, match="does not hold"):
        chain.offer_part(0, part(v(8, 1), v(9)), 2)
    publish(chain, v(7, 1), None, token=2)
    publish(chain, v(8, 1), v(7, 1), token=2)
    assert path(chain, v(9)) == [(None, v(7, 1)), (v(7, 1), v(8, 1))]
    assert path(chain, v(8)) == path(chain, None)  # the same number, other weights
    with pytest.raises(FencedError, match="given up"):
        chain.offer_part(0, part(v(10), v(9)), 2)
    assert [manifest.version for manifest in chain.retained()] == [v(7, 1), v(8, 1)]


def test_the_first_delta_may_start_from_the_checkpoint_that_every_receiver_loads() -> None:
    chain = VersionChain("run", 1, keep=1, root=v(0))
    assert chain.newest == v(0) and path(chain, v(0)) == []
    publish(chain, v(1), v(0))
    publish(chain, v(2), v(1))
    assert path(chain, v(0)) == [(v(0), v(1)), (v(1), v(2))]
    with pytest.raises(WrongBaseError, match="without a keyframe"):
        chain.what_next(None)


def test_a_version_cannot_hang_on_a_base_from_before_the_newest_keyframe_alone() -> None:
    chain = VersionChain("run", 1)
    publish(chain, v(1), None)
    publish(chain, v(2), None)
    with pytest.raises(WrongBaseError, match="does not hold"):
        chain.offer_part(0, part(v(3), v(1)), 1)
    publish(chain, v(3), v(2))
    publish(chain, v(3), v(1))
    assert path(chain, v(1)) == [(v(1), v(3))] and path(chain, None) == [(None, v(2)), (v(2), v(3))]


def test_a_delta_applies_to_its_base_alone() -> None:
    delta = part(v(3), v(2))
    check_base(v(2), delta)
    check_base(None, part(v(3), None))
    for have in (None, v(1), v(3), v(2, 1)):
        with pytest.raises(WrongBaseError, match="ask for a keyframe"):
            check_base(have, delta)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["delta", "key", "squash", "restart"]), st.integers(1, 3)), max_size=30))
def test_from_anywhere_there_is_a_way_to_the_newest_version_and_retention_keeps_it(
    events: list[tuple[str, int]],
) -> None:
    keep = 3
    chain = VersionChain("run", 1, keep=keep)
    publish(chain, v(0), None)
    seen, token = [v(0)], 1
    for event, number in events:
        newest = chain.newest
        assert newest is not None
        target = v(newest.version + number, newest.incarnation)
        if event == "restart":
            token += 1
            publish(chain, v(max(0, newest.version - number), newest.incarnation + 1), None, token)
        elif event == "key":
            publish(chain, target, None, token)
        elif event == "squash":
            publish(chain, target, newest, token)
            bases = [manifest.version for manifest in chain.retained() if manifest.version < target]
            publish(chain, target, bases[-min(number, len(bases))], token)
        else:
            publish(chain, target, newest, token)
            publish(chain, target, newest, token)
        assert chain.newest is not None
        seen.append(chain.newest)
        kept = {manifest.version for manifest in chain.retained()}
        recent = sorted({version for version in seen if version.incarnation == chain.newest.incarnation})[-keep:]
        assert kept.issuperset(recent)
        for have in (None, *seen):
            at = have
            for manifest in chain.what_next(have):
                check_base(at, manifest)
                at = manifest.version
            assert at == chain.newest
    assert chain.digest is not None
