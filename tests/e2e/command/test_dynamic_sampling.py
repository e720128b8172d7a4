"""Groups that teach nothing are replaced: batches stay whole, and it cannot go on for ever."""

from collections import Counter
from typing import Any

import msgspec

Train = Any  # the fixture of conftest.py

# All samples of an even prompt get the same; those of an odd one differ.
HALF_TEACH = """
import itertools
numbers = itertools.count(2)
def score(prompt, response, data):
    return 1.0 if data["answer"] % 2 == 0 else float(next(numbers))
"""


def test_dynamic_filter_raw_groups_of_equal_rewards_are_replaced_until_the_batch_is_whole(train: Train) -> None:
    """K-039."""
    train.write_reward(HALF_TEACH)
    train.start_learner()
    options = ("--algorithm.dynamic_sampling=on", "--algorithm.dynamic_sampling_rounds=20")
    ended = train.run("--run.steps=4", *options)
    assert ended.code == 0, ended.err
    rows = train.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert sum(row.get("groups/filtered", 0) for row in rows) >= 4
    samples = [msgspec.json.decode(line) for line in (train.run_folder / "samples.jsonl").read_bytes().splitlines()]
    groups = Counter(sample["record_id"].split("/")[0] for sample in samples)
    assert len(groups) == 4 * 2 and set(groups.values()) == {2}
    assert all(sample["reward"] != 1.0 for sample in samples)


def test_dynamic_filter_bounded_a_reward_that_is_always_the_same_ends_the_run_with_the_settings_to_change(
    train: Train,
) -> None:
    """K-077: three rounds of two groups, then one sentence."""
    train.write_reward("def score(prompt, response, data): return 1.0")
    train.start_learner()
    ended = train.run("--run.steps=4", "--algorithm.dynamic_sampling=on", "--algorithm.dynamic_sampling_rounds=3")
    assert ended.code == 1, (ended, train.log())
    (line,) = ended.err.splitlines()
    assert line.startswith("error: 6 groups in a row were filtered because they teach nothing")
    assert "every reward of the run so far was 1" in line and "algorithm.dynamic_sampling_rounds" in line
    train.assert_nothing_is_left()


def test_prompts_that_run_out_because_groups_were_replaced_end_the_run_with_that_reason(train: Train) -> None:
    """Eight prompts are enough for four steps of two groups, and half of them teach nothing."""
    train.write_prompts([{"prompt": [n + 1, 2, 3], "answer": n} for n in range(8)])
    train.write_reward(HALF_TEACH)
    train.start_learner()
    options = ("--algorithm.dynamic_sampling=on", "--algorithm.dynamic_sampling_rounds=20", "--data.epochs=1")
    ended = train.run("--run.steps=4", *options)
    assert ended.code == 1, (ended, train.log())
    (line,) = ended.err.splitlines()
    assert line.startswith("error: the prompts ran out after 2 of 4 steps, with 0 groups left")
    assert "4 zero_variance" in line and 'algorithm.dynamic_sampling = "off"' in line and "data.epochs = 0" in line
    assert len(train.rows()) == 2
    train.assert_nothing_is_left()
