"""The configuration as text."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.config import Config, DataConfig, RunConfig, describe_schema, effective_toml, read_config
from headrace.engine.config.keys import keys
from headrace.engine.errors import ConfigError

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
OPTIONS = st.dictionaries(TEXT, TEXT | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.booleans())


@given(name=TEXT, options=OPTIONS.filter(lambda options: float("inf") not in options.values()))
def test_what_is_printed_gives_an_equal_configuration(
    name: str, options: dict[str, str | int | float | bool | None]
) -> None:
    options = {key: value for key, value in options.items() if value not in (float("inf"), float("-inf"))}
    config = Config(run=RunConfig(name=name), data=DataConfig(options=options))
    assert read_config(None, text=effective_toml(config)) == config


def test_every_key_is_printed() -> None:
    tree = tomllib.loads(effective_toml(Config()))
    for path in keys():
        branch = tree
        for part in path.split("."):
            branch = branch[part]


def test_none_has_no_toml_form() -> None:
    with pytest.raises(ConfigError, match=r"data\.options\.x is None"):
        effective_toml(Config(data=DataConfig(options={"x": None})))


def test_the_schema_is_a_valid_file_with_the_defaults() -> None:
    assert read_config(None, text=describe_schema()) == Config()


def test_the_schema_says_what_a_key_may_be_what_it_is_for_and_its_other_names() -> None:
    lines = describe_schema().splitlines()
    assert "[algorithm.importance]  # Correction for the difference between sampler and learner." in lines
    line = next(line for line in lines if line.startswith("group_size = 8"))
    assert line.endswith("# an integer of at least 1; samples of one prompt; also: num_generations")
