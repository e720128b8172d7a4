"""Each receiver is led to the newest version in one go, never backwards, and by the whole state after a failure."""

import numpy as np
import pytest

from headrace.engine.errors import InputError
from headrace.engine.types import AckStatus, PolicyVersion, WeightAck
from headrace.engine.weights.change_log import Touched
from headrace.engine.weights.host_offers import HostOffers, Offer


def version(number: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion(incarnation, number)


def touched(*positions: int) -> list[Touched]:
    return [Touched(tensor_index=0, start=0, count=100, positions=np.array(positions, np.int64))]


def at_version(newest: int) -> HostOffers:
    """A host that came to version 1 as a whole and then step by step, with digest 10 * version."""
    offers = HostOffers()
    offers.moved(version(1), 10, None, 1 << 30)
    for number in range(2, newest + 1):
        offers.moved(version(number), 10 * number, touched(number), 1 << 30)
    return offers


def serving(number: int, digest: int | None = None) -> WeightAck:
    return WeightAck(
        version=version(number), status=AckStatus.SERVING, digest=10 * number if digest is None else digest
    )


def test_a_receiver_that_lags_is_offered_one_change_to_the_newest_version() -> None:
    offers = at_version(4)
    stream = offers.subscribe("r", version(2), deltas=True)
    offer = offers.next_for(stream)
    assert offer == Offer(version=version(4), base=version(2))
    positions = [one.positions.tolist() for one in offers.since(version(2)) if one.positions is not None]
    assert positions == [[3, 4]]


def test_the_next_offer_waits_for_the_answer_to_the_last() -> None:
    offers = at_version(2)
    stream = offers.subscribe("r", version(1), deltas=True)
    offer = offers.next_for(stream)
    assert offer is not None
    offers.offer(stream, offer)
    offers.moved(version(3), 30, touched(3), 1 << 30)
    offers.moved(version(4), 40, touched(3), 1 << 30)
    assert offers.next_for(stream) is None
    assert offers.needed() == {offer}
    assert offers.acknowledge("r", serving(2))
    assert offers.needed() == set()
    assert offers.next_for(stream) == Offer(version=version(4), base=version(2))
    assert offers.acknowledge("r", serving(4))
    assert offers.next_for(stream) is None


@pytest.mark.parametrize("have", [None, version(0), version(7, incarnation=-1)])
def test_who_has_nothing_of_use_is_offered_the_whole_state(have: PolicyVersion | None) -> None:
    offers = at_version(3)
    assert offers.next_for(offers.subscribe("r", have, deltas=True)) == Offer(version=version(3), base=None)


def test_who_takes_no_deltas_is_offered_the_whole_state() -> None:
    offers = at_version(3)
    assert offers.next_for(offers.subscribe("r", version(2), deltas=False)) == Offer(version=version(3), base=None)


@pytest.mark.parametrize("status", [AckStatus.WRONG_BASE, AckStatus.CORRUPT, AckStatus.FAILED])
def test_after_a_failure_the_whole_state_is_offered_even_of_the_version_that_is_served(status: AckStatus) -> None:
    offers = at_version(3)
    stream = offers.subscribe("r", version(3), deltas=True)
    assert offers.next_for(stream) is None
    assert not offers.acknowledge("r", WeightAck(version=version(3), status=status, message="why"))
    assert offers.next_for(stream) == Offer(version=version(3), base=None)
    assert offers.failures("r") == 1 and "why" in offers.failure("r")
    assert offers.acknowledge("r", serving(3))
    assert offers.next_for(stream) is None


def test_a_digest_that_is_not_the_versions_leads_to_the_whole_state() -> None:
    offers = at_version(3)
    stream = offers.subscribe("r", version(2), deltas=True)
    assert not offers.acknowledge("r", serving(3, digest=31))
    assert offers.next_for(stream) == Offer(version=version(3), base=None)


def test_an_agent_that_is_behind_its_receivers_offers_nothing_until_it_has_caught_up() -> None:
    offers = at_version(3)
    stream = offers.subscribe("r", version(5), deltas=True)
    assert offers.next_for(stream) is None
    for number in (4, 5):
        offers.moved(version(number), 10 * number, touched(number), 1 << 30)
        assert offers.next_for(stream) is None
    offers.moved(version(6), 60, touched(6), 1 << 30)
    assert offers.next_for(stream) == Offer(version=version(6), base=version(5))


def test_a_new_incarnation_begins_with_the_whole_state_whatever_its_numbers() -> None:
    offers = at_version(3)
    stream = offers.subscribe("r", version(3), deltas=True)
    offers.moved(version(2, incarnation=1), 7, touched(1), 1 << 30)
    assert offers.next_for(stream) == Offer(version=version(2, incarnation=1), base=None)


def test_while_the_copy_is_lost_nothing_is_offered_and_afterwards_the_past_is_unknown() -> None:
    offers = at_version(3)
    stream = offers.subscribe("r", version(2), deltas=True)
    offers.lost()
    assert offers.version is None and offers.next_for(stream) is None
    offers.moved(version(4), 40, touched(4), 1 << 30)
    assert offers.next_for(stream) == Offer(version=version(4), base=None)


def test_a_second_stream_of_the_same_name_takes_over() -> None:
    offers = at_version(3)
    old = offers.subscribe("r", version(2), deltas=True)
    new = offers.subscribe("r", version(1), deltas=True)
    assert offers.next_for(old) is None
    assert offers.next_for(new) == Offer(version=version(3), base=version(1))
    offers.leave(old)
    assert offers.is_current(new)
    offers.leave(new)
    assert not offers.knows("r")
    with pytest.raises(InputError):
        offers.acknowledge("r", serving(3))


def test_an_offer_that_could_not_be_made_is_worked_out_anew() -> None:
    offers = at_version(3)
    stream = offers.subscribe("r", version(2), deltas=True)
    offer = offers.next_for(stream)
    assert offer is not None
    offers.offer(stream, offer)
    offers.moved(version(4), 40, touched(4), 1 << 30)
    offers.withdraw(stream)
    assert offers.next_for(stream) == Offer(version=version(4), base=version(2))


@pytest.mark.parametrize(("status", "refusals"), [(AckStatus.UNKNOWN_LAYOUT, 1), (AckStatus.CORRUPT, 3)])
def test_a_receiver_that_cannot_take_deltas_is_offered_no_more_of_them(status: AckStatus, refusals: int) -> None:
    offers = at_version(2)
    stream = offers.subscribe("r", version(1), deltas=True)
    number = 2
    for _ in range(refusals):
        offer = offers.next_for(stream)
        assert offer is not None and offer.base is not None
        offers.offer(stream, offer)
        offers.acknowledge("r", WeightAck(version=version(number - 1), status=status))
        whole = offers.next_for(stream)
        assert whole == Offer(version=version(number), base=None)
        offers.offer(stream, whole)
        assert offers.acknowledge("r", serving(number))
        number += 1
        offers.moved(version(number), 10 * number, touched(number), 1 << 30)
    assert offers.next_for(stream) == Offer(version=version(number), base=None)
