import pytest

from headrace.engine.errors import InputError
from headrace.engine.types import AckStatus, PolicyVersion, WeightAck
from headrace.engine.weights.receivers import ReceiverTable


def v(number: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion(incarnation, number)


def ack(version: PolicyVersion, status: AckStatus = AckStatus.SERVING, digest: int = 0) -> WeightAck:
    return WeightAck(version=version, status=status, digest=digest, message="stream broke")


def two_at_seven() -> ReceiverTable:
    table = ReceiverTable()
    for name in ("a", "b"):
        table.register(name, v(7))
    return table


@pytest.mark.parametrize("claimed", [7, 8])
@pytest.mark.parametrize("status", [status for status in AckStatus if status is not AckStatus.SERVING])
def test_version_on_success_a_failed_update_never_moves_the_receiver(status: AckStatus, claimed: int) -> None:
    table = two_at_seven()
    assert table.acknowledge("a", ack(v(8), digest=5), expected_digest=5)
    assert not table.acknowledge("b", ack(v(claimed), status))
    assert table.serving("a") == v(8) and table.serving("b") == v(7)
    assert table.serving_at_least(v(8)) == ["a"] and table.laggards(v(8)) == ["b"]
    assert table.base_for_update("a") == v(8) and table.base_for_update("b") is None  # a full update next
    assert "stream broke" in table.failure("b") and table.failures("b") == 1
    assert table.acknowledge("b", ack(v(8)))
    assert table.base_for_update("b") == v(8) and table.failure("b") == "" and table.failures("b") == 0


def test_version_on_success_a_receiver_with_a_wrong_digest_serves_nothing_that_counts() -> None:
    table = two_at_seven()
    assert not table.acknowledge("b", ack(v(8), digest=4), expected_digest=5)
    assert table.serving("b") is None and table.serving_at_least(v(0)) == ["a"]
    assert table.base_for_update("b") is None and "0000000000000005" in table.failure("b")


def test_an_acknowledgement_that_was_overtaken_changes_nothing() -> None:
    table = two_at_seven()
    assert table.acknowledge("a", ack(v(9)))
    assert not table.acknowledge("a", ack(v(8)))
    assert table.serving("a") == v(9)
    assert table.acknowledge("a", ack(v(3, 1)))  # a new incarnation is newer, whatever its number


def test_a_receiver_that_comes_back_starts_from_what_it_says() -> None:
    table = two_at_seven()
    table.acknowledge("a", ack(v(9)))
    table.register("a", None)
    assert table.serving("a") is None and table.laggards(v(0)) == ["a"]
    table.remove("a")
    table.remove("a")
    with pytest.raises(InputError, match="register it first"):
        table.acknowledge("a", ack(v(9)))


def test_the_full_update_after_a_failure_counts_though_it_is_older_than_what_was_served() -> None:
    """The newest keyframe may lie before the version that failed to move; the deltas after it follow."""
    table = two_at_seven()
    assert not table.acknowledge("a", ack(v(6)))
    assert not table.acknowledge("a", ack(v(7), AckStatus.CORRUPT))
    assert table.acknowledge("a", ack(v(5)))
    assert table.base_for_update("a") == v(5) and table.failures("a") == 0
    assert not table.acknowledge("a", ack(v(4)))
