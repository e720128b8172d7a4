import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.advantages.moments import Moments
from headrace.actors.learner.advantages.normalizer import RewardNormalizer
from headrace.engine.errors import InputError

batches = st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=5), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(batches)
def test_rewards_are_divided_by_the_deviation_of_all_that_came(given_batches: list[list[int]]) -> None:
    normalizer, centred = RewardNormalizer(), RewardNormalizer(center=True)
    for batch in given_batches:
        normalizer.update(batch)
        centred.update(batch)
    seen = np.array([reward for batch in given_batches for reward in batch], np.float64)
    if np.ptp(seen):
        assert normalizer.normalize([3.0, -1.0]) == pytest.approx(np.array([3.0, -1.0]) / np.std(seen))
        assert centred.normalize([3.0, -1.0]) == pytest.approx((np.array([3.0, -1.0]) - seen.mean()) / np.std(seen))
    else:
        assert normalizer.normalize([3.0, -1.0]).tolist() == [3.0, -1.0]


def test_normalising_counts_nothing() -> None:
    normalizer = RewardNormalizer()
    normalizer.update([0.0, 2.0])
    before = normalizer.state()
    assert normalizer.normalize([5.0]).tolist() == normalizer.normalize([5.0]).tolist() == [5.0]
    assert normalizer.state() == before


def test_normalised_rewards_are_clipped() -> None:
    normalizer = RewardNormalizer(clip=2.0)
    normalizer.update([0.0, 2.0])
    assert normalizer.normalize([-50.0, 1.0, 50.0]).tolist() == [-2.0, 1.0, 2.0]


def test_without_a_deviation_rewards_stay_as_they_are() -> None:
    normalizer = RewardNormalizer(center=True, clip=1.0)
    assert normalizer.normalize([7.0]).tolist() == [7.0]
    normalizer.update(np.full(7, 0.1, np.float32))
    assert normalizer.normalize([7.0]).tolist() == [7.0]


@settings(max_examples=40, deadline=None)
@given(batches, batches)
def test_a_restored_normalizer_goes_on_as_the_old_one(earlier: list[list[int]], later: list[list[int]]) -> None:
    old, new = RewardNormalizer(), RewardNormalizer()
    for batch in earlier:
        old.update(batch)
    new.restore(msgspec.json.decode(msgspec.json.encode(old.state()), type=Moments))
    for batch in later:
        old.update(batch)
        new.update(batch)
    assert new.state() == old.state()
    assert new.normalize([1.0, 2.0]).tolist() == old.normalize([1.0, 2.0]).tolist()


@pytest.mark.parametrize("rewards", [[], [float("nan")], [[1.0]]])
def test_a_refused_batch_counts_nothing(rewards: list[float]) -> None:
    normalizer = RewardNormalizer()
    normalizer.update([1.0, 2.0])
    before = normalizer.state()
    with pytest.raises(InputError):
        normalizer.update(rewards)
    with pytest.raises(InputError):
        normalizer.normalize(rewards)
    assert normalizer.state() == before


@pytest.mark.parametrize(
    "state", [Moments(weight=-1.0), Moments(weight=1.0, spread=-1.0), Moments(weight=1.0, mean=float("nan"))]
)
def test_a_state_of_no_rewards_is_refused(state: Moments) -> None:
    with pytest.raises(InputError, match="start without them"):
        RewardNormalizer().restore(state)


@pytest.mark.parametrize("clip", [-1.0, float("nan")])
def test_a_clip_that_is_no_range_is_refused(clip: float) -> None:
    with pytest.raises(InputError, match="0 is no clip"):
        RewardNormalizer(clip=clip)
