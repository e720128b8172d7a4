import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.actors.prompts.position import Position
from headrace.engine.errors import ConfigError, FormatError


def take(position: Position, number: int) -> list[int]:
    places = [position.next() for _ in range(number)]
    return [place.row for place in places if place is not None]


def issued_until_row_47() -> Position:
    """Rows 0..47 handed out, 0..31 finished."""
    position = Position(100, seed=0, epochs=1, shuffle=False)
    take(position, 48)
    for row in range(32):
        assert position.finish(f"0-{row}")
    return position


def restored(position: Position, keep: frozenset[str] = frozenset()) -> Position:
    fresh = Position(100, seed=0, epochs=1, shuffle=False)
    fresh.restore(json.loads(json.dumps(position.state())), keep)
    return fresh


def test_resume_prompts_without_the_buffer_all_unfinished_prompts_come_again() -> None:
    position = restored(issued_until_row_47())
    assert take(position, 16) == list(range(32, 48))
    assert take(position, 1000) == list(range(48, 100))


def test_resume_prompts_with_the_buffer_what_it_holds_does_not_come_again() -> None:
    position = restored(issued_until_row_47(), frozenset(f"0-{row}" for row in range(40, 44)))
    assert take(position, 12) == [*range(32, 40), *range(44, 48)]
    assert take(position, 1000) == list(range(48, 100))
    assert position.finish("0-40"), "what the buffer holds is still unfinished until it is reported"


def test_resume_prompts_a_second_interruption_loses_nothing() -> None:
    first = restored(issued_until_row_47())
    take(first, 5)
    second = restored(first)
    assert take(second, 1000) == list(range(32, 100))


def test_orders_differ_between_epochs_and_seeds_and_repeat_for_the_same_seed() -> None:
    def orders(seed: int) -> list[list[int]]:
        position = Position(50, seed=seed, epochs=0)
        return [take(position, 50) for _ in range(2)]

    first, again, other = orders(1), orders(1), orders(2)
    assert first == again != other and first[0] != first[1]
    assert all(sorted(order) == list(range(50)) for order in [*first, *other])


def test_the_same_row_in_two_epochs_is_two_prompts() -> None:
    position = Position(1, seed=0, epochs=2)
    places = [position.next(), position.next()]
    assert [place.prompt_id for place in places if place] == ["0-0", "1-0"]
    assert position.next() is None and position.next() is None


@given(
    num_rows=st.integers(1, 12),
    epochs=st.integers(1, 3),
    steps=st.lists(st.sampled_from(["next", "finish", "resume"]), max_size=80),
    seed=st.integers(0, 5),
)
def test_over_all_interruptions_each_prompt_is_finished_exactly_once(
    num_rows: int, epochs: int, steps: list[str], seed: int
) -> None:
    position = Position(num_rows, seed=seed, epochs=epochs)
    running: list[str] = []
    finished: list[str] = []
    for step in [*steps, "resume", *["next", "finish"] * (num_rows * epochs)]:
        if step == "next" and (place := position.next()) is not None:
            running.append(place.prompt_id)
        elif step == "finish" and running:
            finished.append(running.pop(0))
            assert position.finish(finished[-1])
        elif step == "resume":
            state = position.state()
            position = Position(num_rows, seed=seed, epochs=epochs)
            position.restore(state)
            running.clear()
    assert sorted(finished) == sorted(f"{epoch}-{row}" for epoch in range(epochs) for row in range(num_rows))


def test_a_state_of_other_data_is_refused_and_changes_nothing() -> None:
    position = Position(10, seed=0, epochs=1)
    before = position.state()
    with pytest.raises(ConfigError, match=r"of 10 rows with data\.seed 1, the source has 10 rows with data\.seed 0"):
        position.restore(Position(10, seed=1, epochs=1).state())
    with pytest.raises(ConfigError, match="of 11 rows"):
        position.restore(Position(11, seed=0, epochs=1).state())
    for broken in ({}, {**before, "position": 11}, {**before, "unfinished": [[0, 10]]}, {**before, "epoch": "x"}):
        with pytest.raises(FormatError, match="saved state of the prompt source"):
            position.restore(broken)
    assert position.state() == before


def test_no_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="no rows"):
        Position(0, seed=0, epochs=1)
