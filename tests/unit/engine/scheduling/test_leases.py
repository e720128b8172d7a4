"""The lease table against its rules, and against a plain model of them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.engine.errors import FencedError, UsageError
from headrace.engine.scheduling.leases import Lease, LeaseTable


def _lease(table: LeaseTable, step: int, items: str, incarnation: int = 1, consumer: str = "learner") -> Lease:
    table.enter(consumer, incarnation)
    return table.find(step, consumer, incarnation) or table.grant(step, consumer, incarnation, items)


def test_the_same_step_of_the_same_incarnation_is_the_same_lease() -> None:
    table = LeaseTable()
    lease = _lease(table, 0, "ab")
    assert _lease(table, 0, "ab") is lease


def test_tokens_strictly_grow_over_leases_and_a_restarted_table() -> None:
    table = LeaseTable()
    tokens: list[int] = []
    for step in range(3):
        lease = _lease(table, step, "ab"[step % 2])
        tokens.append(lease.token)
        table.commit(step, lease.token)
    assert tokens == [1, 2, 3]
    restarted = LeaseTable(first_step=3, first_token=4)
    assert _lease(restarted, 3, "c").token == 4


def test_a_commit_frees_once_and_its_retry_gets_the_same_answer() -> None:
    table = LeaseTable()
    lease = _lease(table, 0, "ab")
    first = table.commit(0, lease.token)
    assert (first.first, first.freed) == (True, ("a", "b"))
    again = table.commit(0, lease.token)
    assert (again.step, again.first, again.freed) == (0, False, ())
    assert table.next_step == 1


def test_steps_are_committed_in_order() -> None:
    table = LeaseTable()
    ahead = _lease(table, 1, "b")
    with pytest.raises(UsageError, match="before step 0"):
        table.commit(1, ahead.token)
    now = _lease(table, 0, "a")
    table.commit(0, now.token)
    table.commit(1, ahead.token)
    assert table.next_step == 2


def test_a_newer_incarnation_fences_the_older_and_gets_its_items_back() -> None:
    table = LeaseTable()
    old = _lease(table, 0, "ab", incarnation=1)
    assert table.enter("learner", 2) == ("a", "b")
    for forbidden in (lambda: table.commit(0, old.token), lambda: table.release(0, old.token)):
        with pytest.raises(FencedError, match="fenced"):
            forbidden()
    with pytest.raises(FencedError, match="only 2 or newer"):
        table.enter("learner", 1)
    new = _lease(table, 0, "ab", incarnation=2)
    assert new.token > old.token


def test_the_death_of_an_incarnation_returns_its_leases_and_keeps_it_out() -> None:
    table = LeaseTable()
    old = _lease(table, 0, "ab", incarnation=3)
    assert table.consumer_lost("learner", 3) == ("a", "b")
    with pytest.raises(FencedError):
        table.enter("learner", 3)
    with pytest.raises(FencedError):
        table.commit(0, old.token)
    assert table.enter("learner", 4) == ()


def test_late_news_of_an_old_death_does_not_hurt_the_successor() -> None:
    table = LeaseTable()
    lease = _lease(table, 0, "ab", incarnation=2)
    assert table.consumer_lost("learner", 1) == ()
    assert table.commit(0, lease.token).first


def test_a_released_batch_can_be_leased_again_and_the_release_repeated() -> None:
    table = LeaseTable()
    lease = _lease(table, 0, "ab")
    assert table.release(0, lease.token) == ("a", "b")
    assert table.release(0, lease.token) == ()
    with pytest.raises(FencedError, match="given back"):
        table.commit(0, lease.token)
    assert table.commit(0, _lease(table, 0, "ab").token).first


def test_another_consumer_cannot_take_a_leased_step_or_item() -> None:
    table = LeaseTable()
    _lease(table, 0, "ab")
    with pytest.raises(FencedError, match="leased to incarnation 1 of 'learner'"):
        _lease(table, 0, "cd", consumer="critic")
    with pytest.raises(UsageError, match="'b' cannot be leased for step 1"):
        _lease(table, 1, "bc", consumer="critic")


def test_a_guessed_token_commits_nothing() -> None:
    table = LeaseTable()
    lease = _lease(table, 0, "ab")
    with pytest.raises(FencedError, match="not the lease of step 0"):
        table.commit(0, lease.token + 1)
    with pytest.raises(FencedError):
        table.commit(1, lease.token)
    assert table.next_step == 0


def test_committed_batches_are_held_until_a_checkpoint_covers_them() -> None:
    table = LeaseTable()
    table.hold_for_checkpoints()
    for step, items in enumerate(("ab", "cd", "ef")):
        assert table.commit(step, _lease(table, step, items).token).freed == ()
    assert table.checkpoint_covers(1) == ("a", "b", "c", "d")
    assert table.held == {2: ("e", "f")}
    assert table.covered_step == 1


def test_a_rewind_replays_the_held_batches_in_order() -> None:
    table = LeaseTable()
    table.hold_for_checkpoints()
    first = _lease(table, 0, "ab")
    table.commit(0, first.token)
    table.checkpoint_covers(0)
    second = _lease(table, 1, "cd")
    table.commit(1, second.token)
    ahead = _lease(table, 2, "ef")
    assert table.rewind(1) == ("e", "f")
    with pytest.raises(FencedError):
        table.commit(1, second.token)
    with pytest.raises(FencedError):
        table.commit(2, ahead.token)
    assert table.replay(1) == ("c", "d")
    with pytest.raises(UsageError, match="replayed"):
        _lease(table, 1, "ef", incarnation=2)
    again = _lease(table, 1, "cd", incarnation=2)
    assert again.replay and again.token > ahead.token
    assert table.release(1, again.token) == (), "a replayed batch stays pinned to its step"
    assert table.commit(1, _lease(table, 1, "cd", incarnation=2).token).first


def test_a_rewind_past_what_is_held_is_refused() -> None:
    table = LeaseTable()
    table.commit(0, _lease(table, 0, "ab").token)
    with pytest.raises(UsageError, match="step 0 is no longer held"):
        table.rewind(0)
    with pytest.raises(UsageError, match="the next step is 1"):
        table.rewind(2)


def test_memory_of_ended_leases_is_bounded() -> None:
    table = LeaseTable(remember=4)
    tokens: list[int] = []
    for step in range(10):
        tokens.append(_lease(table, step, "ab").token)
        table.commit(step, tokens[-1])
    assert not table.commit(9, tokens[9]).first
    with pytest.raises(FencedError):
        table.commit(0, tokens[0])


class LeaseMachine(RuleBasedStateMachine):
    """Ten items, two consumers, prefetch of one step, held batches; the model is a dict from item to place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.table.hold_for_checkpoints()
        self.place: dict[str, object] = dict.fromkeys("abcdefghij", "pool")
        self.pinned: dict[int, tuple[str, ...]] = {}
        self.incarnation = 1
        self.given: dict[int, Lease] = {}
        self.step = 0
        self.last_token = 0

    def _back(self, lease: Lease) -> None:
        for item in lease.items:
            self.place[item] = ("pinned", lease.step) if lease.replay else "pool"

    def _live(self) -> list[Lease]:
        return [lease for lease in self.given.values() if self.place[lease.items[0]] == lease.token]

    @rule(ahead=st.integers(0, 1), count=st.integers(1, 3))
    def take(self, ahead: int, count: int) -> None:
        step = self.step + ahead
        pool = [item for item, place in self.place.items() if place == "pool"]
        items = self.pinned.get(step, tuple(pool[:count]))
        if not items:
            return
        known = [lease for lease in self._live() if lease.step == step]
        lease = _lease(self.table, step, "".join(items), self.incarnation)
        if known:
            assert lease is known[0]
            return
        assert lease.token > self.last_token
        self.last_token = lease.token
        self.given[lease.token] = lease
        self.place.update(dict.fromkeys(items, lease.token))

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.given.values())))
        live = lease in self._live()
        if live and lease.step == self.step:
            assert self.table.commit(lease.step, lease.token).first
            assert not self.table.commit(lease.step, lease.token).first
            self.place.update(dict.fromkeys(lease.items, ("held", lease.step)))
            self.pinned.pop(lease.step, None)
            self.step += 1
        elif live:
            with pytest.raises(UsageError):
                self.table.commit(lease.step, lease.token)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.given.values())))
        if lease in self._live():
            back = self.table.release(lease.step, lease.token)
            assert back == (() if lease.replay else lease.items)
            self._back(lease)
            with pytest.raises(FencedError):
                self.table.commit(lease.step, lease.token)

    @rule(proven=st.booleans())
    def restart(self, proven: bool) -> None:
        lost = self._live()
        if proven:
            returned = self.table.consumer_lost("learner", self.incarnation)
        else:
            returned = self.table.enter("learner", self.incarnation + 1)
        self.incarnation += 1
        assert sorted(returned) == sorted(item for lease in lost if not lease.replay for item in lease.items)
        for lease in lost:
            self._back(lease)
            with pytest.raises(FencedError):
                self.table.commit(lease.step, lease.token)

    @rule(behind=st.integers(0, 3))
    def checkpoint(self, behind: int) -> None:
        step = self.step - behind
        held = {item for item, place in self.place.items() if isinstance(place, tuple) and place[0] == "held"}
        covered = {item for item in held if self.place[item][1] <= step}  # type: ignore[index]
        assert set(self.table.checkpoint_covers(step)) == covered
        self.place.update(dict.fromkeys(covered, "pool"))  # the producer makes new ones of the same name

    @rule(behind=st.integers(0, 3))
    def rewind(self, behind: int) -> None:
        step = self.step - behind
        held: dict[int, list[str]] = {}
        for item, place in self.place.items():
            if isinstance(place, tuple) and place[0] == "held":
                held.setdefault(place[1], []).append(item)
        if step < 0 or any(lost not in held for lost in range(step, self.step)):
            with pytest.raises(UsageError):
                self.table.rewind(step)
            return
        live = self._live()
        batches = self.table.held
        self.table.rewind(step)
        for lease in live:
            self._back(lease)
        for replayed in range(step, self.step):
            self.pinned[replayed] = batches[replayed]
            self.place.update(dict.fromkeys(batches[replayed], ("pinned", replayed)))
        self.step = step

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.table.next_step == self.step
        assert {lease.token for lease in self.table.live} == {lease.token for lease in self._live()}
        held = {item for batch in self.table.held.values() for item in batch}
        assert held == {i for i, place in self.place.items() if isinstance(place, tuple) and place[0] == "held"}


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
