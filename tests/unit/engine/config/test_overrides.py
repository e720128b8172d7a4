"""`--section.key=value`."""

import pytest

from headrace.engine.config import read_config
from headrace.engine.config.overrides import is_override
from headrace.engine.errors import ConfigError


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(None, overrides)
    return str(caught.value)


def test_an_override_wins_over_the_file_and_the_last_one_over_earlier_ones() -> None:
    config = read_config(None, ["--run.steps=5", "run.steps=6"], text="[run]\nsteps = 4")
    assert config.run.steps == 6


def test_an_alias_on_the_command_line_wins_over_the_name_in_the_file() -> None:
    config = read_config(None, ["--schedule.num_generations=4"], text="[schedule]\ngroup_size = 2")
    assert config.schedule.group_size == 4


def test_values_are_toml() -> None:
    config = read_config(
        None,
        [
            "--algorithm.importance.cap=3",
            "--rollout.partial_rollout=false",
            '--rollout.stop=["a", "b"]',
            "--rollout.kv_cache_bytes=0x1000",
            '--data.options={ min_terms = 2, name = "x" }',
        ],
    )
    assert config.algorithm.importance.cap == 3.0
    assert config.rollout.partial_rollout is False
    assert config.rollout.stop == ("a", "b")
    assert config.rollout.kv_cache_bytes == 4096
    assert config.data.options == {"min_terms": 2, "name": "x"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("first", "first"),
        ("7", "7"),
        ("true", "true"),
        ('"a b"', "a b"),
        ("a=b", "a=b"),
        ("", ""),
        ("1\nx = 2", "1\nx = 2"),
    ],
)
def test_strings_need_no_quotes(text: str, value: str) -> None:
    assert read_config(None, [f"--run.name={text}"]).run.name == value


def test_a_free_key_of_a_table_joins_those_of_the_file() -> None:
    config = read_config(None, ["--data.options.b=2", "--data.options.c=word"], text="[data.options]\na = 1\nb = 1")
    assert config.data.options == {"a": 1, "b": 2, "c": "word"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--learner.learning_rate", "--learner.learning_rate has no value; write it as --learner.learning_rate=VALUE"),
        ("--learner.learning_rate=abc", "--learner.learning_rate=abc is not allowed: give a number above 0"),
        ("--learner.learning_rate=", "is not allowed: give a number above 0"),
        ("--learner.learning_rat=1", "did you mean learner.learning_rate?"),
        ("--run.steps=0", "run.steps = 0 is not allowed: give an integer of at least 1"),
        ("--run.steps=1\nseed = 2", "give one value, without line breaks"),
        ("--run.hub=1", 'run.hub = "1" is not allowed: give one of "inproc", "process"'),
        ("--rollout.stop=a", '--rollout.stop=a is not allowed: give a list of strings, such as ["a", "b"]'),
        ("--data.options.a=[1]", "data.options.a = [1] is not allowed"),
        ("--run=3", "run: this is a section; name one of its keys, such as run.name"),
        ("--run.name.x=1", "run.name.x: run.name is a single key, with no keys below it"),
    ],
)
def test_a_wrong_override_is_refused_in_one_sentence(override: str, message: str) -> None:
    assert message in refusal(override)


def test_both_names_of_one_key_on_the_command_line_are_refused() -> None:
    assert "are two names of one key" in refusal("--learner.lr=1.0", "--learner.learning_rate=1.0")


def test_only_dotted_options_are_overrides() -> None:
    assert is_override("--a.b=1") and is_override("--a.b") and is_override("--data.options.min-terms=1")
    assert not any(map(is_override, ["--debug", "--port-file=/tmp/a.b", "a.b=1", "-a.b=1", "--a.=1", "--", "--3.b=1"]))
