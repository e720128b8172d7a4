import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import InputError
from headrace.engine.scheduling.inflight import Assignment, DispatchQueue
from headrace.engine.types import PolicyVersion


def v(number: int) -> PolicyVersion:
    return PolicyVersion(0, number)


def assigned(queue: DispatchQueue) -> list[tuple[str, str]]:
    given: list[tuple[str, str]] = []
    while (assignment := queue.next_assignment()) is not None:
        given.append((assignment.worker, assignment.group_id))
    return given


def test_the_first_group_goes_to_the_worker_with_most_free_credit() -> None:
    queue = DispatchQueue()
    queue.add_worker("small", 1, v(0))
    queue.add_worker("large", 3, v(0))
    for name in "abcde":
        queue.push(name, v(0))
    assert queue.next_assignment() == Assignment(worker="large", group_id="a", min_version=v(0), serving=v(0))
    assert assigned(queue) == [("large", "b"), ("small", "c"), ("large", "d")]
    assert (queue.num_waiting, queue.num_in_flight) == (1, 4)
    queue.finished("c")
    assert assigned(queue) == [("small", "e")]


def test_version_on_success_a_laggard_gets_nothing_until_it_has_acknowledged() -> None:
    queue = DispatchQueue()
    queue.add_worker("a", 1, v(8))
    queue.add_worker("b", 9, v(7))
    for name in ("one", "two"):
        queue.push(name, v(8))
    assert assigned(queue) == [("a", "one")]
    queue.set_version("b", v(8))
    assert assigned(queue) == [("b", "two")]


def test_a_group_that_nobody_can_run_does_not_hold_up_one_that_somebody_can() -> None:
    queue = DispatchQueue()
    queue.add_worker("w", 2, v(1))
    queue.push("new", v(2))
    queue.push("old", v(1))
    assert assigned(queue) == [("w", "old")]
    queue.set_min_version("new", v(1))
    assert assigned(queue) == [("w", "new")]


def test_the_groups_of_a_lost_worker_come_back_to_their_old_places() -> None:
    queue = DispatchQueue()
    queue.add_worker("lost", 2, v(0))
    for name in "abc":
        queue.push(name, v(0))
    assert len(assigned(queue)) == 2
    assert queue.worker_lost("lost") == ["a", "b"]
    assert queue.num_in_flight == 0
    queue.add_worker("fresh", 9, v(0))
    assert [group for _, group in assigned(queue)] == ["a", "b", "c"]


def test_a_draining_worker_finishes_what_it_has_and_gets_no_more() -> None:
    queue = DispatchQueue()
    queue.add_worker("w", 2, v(0))
    queue.push("a", v(0))
    assert assigned(queue) == [("w", "a")]
    queue.drain("w")
    queue.push("b", v(0))
    assert assigned(queue) == [] and queue.in_flight("w") == ["a"]


def test_cancelling_tells_whom_to_tell_and_frees_the_credit() -> None:
    queue = DispatchQueue()
    queue.add_worker("w", 1, v(0))
    for name in "abc":
        queue.push(name, v(0))
    assert assigned(queue) == [("w", "a")]
    assert queue.cancel("b") is None
    assert queue.cancel("a") == "w"
    assert assigned(queue) == [("w", "c")]
    queue.push("a", v(0))  # a cancelled name may be used again
    assert queue.num_waiting == 1


def test_a_limit_bounds_all_workers_together_and_may_be_moved() -> None:
    queue = DispatchQueue(limit=1)
    queue.add_worker("w", 5, v(0))
    for name in "abc":
        queue.push(name, v(0))
    assert len(assigned(queue)) == 1
    queue.limit = 2
    assert len(assigned(queue)) == 1
    queue.set_credits("w", 0)
    queue.limit = None
    assert assigned(queue) == []


def test_strangers_and_doubles_are_refused() -> None:
    queue = DispatchQueue()
    queue.push("g", v(0))
    queue.add_worker("w", 1, v(0))
    for wrong in (
        lambda: queue.push("g", v(0)),
        lambda: queue.finished("g"),
        lambda: queue.returned("g"),
        lambda: queue.cancel("x"),
        lambda: queue.add_worker("w", 1, v(0)),
        lambda: queue.set_credits("w", -1),
        lambda: queue.worker_lost("x"),
    ):
        with pytest.raises(InputError):
            wrong()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_in_any_order_of_events_groups_are_kept_credits_hold_and_the_earliest_goes_first(seed: int) -> None:
    rng = random.Random(seed)
    queue = DispatchQueue(limit=rng.choice([None, 3]))
    needs: dict[str, int] = {}  # in order of entry
    where: dict[str, str] = {}
    workers: dict[str, tuple[int, int]] = {}  # credits, version
    for number in range(120):
        event = rng.randrange(7)
        name = rng.choice(list(needs)) if needs else ""
        if event <= 1:
            needs[f"g{number}"] = rng.randrange(4)
            queue.push(f"g{number}", v(needs[f"g{number}"]))
        elif event == 2 and len(workers) < 3:
            workers[f"w{number}"] = (rng.randrange(3), rng.randrange(4))
            queue.add_worker(f"w{number}", workers[f"w{number}"][0], v(workers[f"w{number}"][1]))
        elif event == 3 and workers:
            lost = rng.choice(list(workers))
            assert sorted(queue.worker_lost(lost)) == sorted(group for group, at in where.items() if at == lost)
            where = {group: at for group, at in where.items() if at != lost}
            del workers[lost]
        elif event == 4 and name:
            needs[name] = rng.randrange(4)
            queue.set_min_version(name, v(needs[name]))
        elif event == 5 and name:
            assert queue.cancel(name) == where.pop(name, None)
            del needs[name]
        elif event == 6:
            in_flight = {worker: sum(at == worker for at in where.values()) for worker in workers}
            free = {w: version for w, (credits, version) in workers.items() if credits > in_flight[w]}
            able = [g for g in needs if g not in where and any(needs[g] <= version for version in free.values())]
            given = queue.next_assignment()
            if queue.limit is not None and len(where) >= queue.limit:
                able = []
            assert (given.group_id if given else None) == (able[0] if able else None)
            if given:
                assert needs[given.group_id] <= free[given.worker]
                room = {w: workers[w][0] - in_flight[w] for w, at in free.items() if at >= needs[given.group_id]}
                assert room[given.worker] == max(room.values())
                where[given.group_id] = given.worker
        assert (queue.num_waiting, queue.num_in_flight) == (len(needs) - len(where), len(where))
