"""What the hub's children find in their environment."""

from headrace.engine.hub.actors import polite_threads


def test_threads_sleep_at_barriers_unless_the_user_has_said_how_they_wait() -> None:
    assert polite_threads({}) == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert polite_threads({"OMP_WAIT_POLICY": "ACTIVE"}) == {}
