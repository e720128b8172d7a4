"""Reading TOML into the structs, and what is said about files that cannot be used."""

from pathlib import Path

import pytest

from headrace.engine.config import (
    Config,
    RewardConfig,
    RunConfig,
    ScheduleConfig,
    check_config,
    load_config,
    read_config,
)
from headrace.engine.errors import ConfigError

MINIMAL = '[model]\npath = "some/model"\n[reward]\nfunction = "rewards:score"\n'


def refusal(toml: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(Path("run.toml"), overrides, text=toml)
    return str(caught.value)


def test_a_minimal_file_gives_the_defaults_for_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(MINIMAL)
    config = load_config(file)
    assert load_config(str(file)) == config
    assert config.model.path == "some/model"
    assert config.schedule == ScheduleConfig()


def test_no_file_gives_the_defaults() -> None:
    assert read_config(None) == Config()


def test_unknown_keys_are_refused_with_path_section_and_nearest_name() -> None:
    assert refusal("[learner]\nlearning_rat = 1e-5") == (
        'run.toml: learner.learning_rat: section [learner] has no key "learning_rat"; '
        "did you mean learner.learning_rate?"
    )


def test_unknown_keys_1e_5_is_a_number() -> None:
    assert read_config(None, text="[learner]\nlearning_rate = 1e-5").learner.learning_rate == 0.00001
    assert read_config(None, ["--learner.learning_rate=1e-5"]).learner.learning_rate == 0.00001


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (
            "[learner]\ngroup_size = 2",
            'learner.group_size: section [learner] has no key "group_size"; that key exists in '
            "[schedule]: write schedule.group_size",
        ),
        ("[learner]\nseed = 2", "that key exists in [run], [data], [eval]: write run.seed or data.seed or eval.seed"),
        ("[rollout]\nnum_generations = 2", "write schedule.group_size"),
        ("[importance]\ncap = 1.0", "there is no section [importance]; did you mean algorithm.importance.cap?"),
        ("[learnr]\nlearning_rate = 1.0", "there is no section [learnr]; did you mean learner.learning_rate?"),
        ("[algorithm.importanc]\ncap = 1.0", "did you mean algorithm.importance.cap?"),
        ("learning_rate = 1.0", "learning_rate: this key stands outside any section; write learner.learning_rate"),
        ("learning_rat = 1.0", "there is no such key or section; did you mean learner.learning_rate?"),
        ("[run.name]\nx = 1", "run.name = { x = 1 } is not allowed: give a string"),
        ("[nonsense]\nqq = 1", "there is no section [nonsense]; the sections are run, model,"),
        ("[buffer]\nqq = 1", 'section [buffer] has no key "qq"; its keys are capacity_records, capacity_bytes'),
        ("[schedule]\nmax_stale = 1", "did you mean schedule.max_staleness?"),
    ],
)
def test_a_misplaced_or_misspelt_key_is_refused_with_the_place_to_write_it(toml: str, message: str) -> None:
    assert message in refusal(toml)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[schedule]\ngroup_size = 0", "schedule.group_size = 0 is not allowed: give an integer of at least 1"),
        ("[schedule]\ngroup_size = true", "schedule.group_size = true is not allowed: give an integer of at least 1"),
        ("[schedule]\ngroup_size = 2.5", "schedule.group_size = 2.5 is not allowed: give an integer of at least 1"),
        ("[schedule]\nnum_generations = 0", "schedule.num_generations = 0 is not allowed"),
        ('[learner]\nlearning_rate = "1e-5"', 'learner.learning_rate = "1e-5" is not allowed: give a number above 0, '
         "without quotes"),
        ("[rollout]\ntop_p = 1.5", "rollout.top_p = 1.5 is not allowed: give a number above 0 and of at most 1"),
        ("[rollout]\ntemperature = inf", "temperature = inf is not allowed: give a number above 0 that is finite"),
        ("[rollout]\ntemperature = nan", "temperature = nan is not allowed: give a number above 0 that is finite"),
        ('[run]\nhub = "x"', 'run.hub = "x" is not allowed: give one of "inproc", "process"'),
        ('[rollout]\nstop = "x"', 'rollout.stop = "x" is not allowed: give a list of strings, such as ["a", "b"]'),
        ("[rollout]\nstop = [1]", "rollout.stop = [1] is not allowed: give a list of strings"),
        ("run = 3", "run = 3 is not allowed: run is a section, write [run]"),
        ("[data]\noptions = 3", "data.options = 3 is not allowed: give a table of strings, numbers and booleans"),
        ("[data.options]\na = [1]", "data.options.a = [1] is not allowed: give a string, an integer, a number or "
         "true or false"),
        ("[data.options]\na = inf", "data.options.a = inf is not allowed: give a finite number"),
        ("[run]\nname = 1979-05-27", "run.name = 1979-05-27 is not allowed: give a string"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_what_was_given_and_what_is_allowed(toml: str, message: str) -> None:
    assert message in refusal(toml)


def test_other_names_are_understood() -> None:
    config = read_config(None, text="[schedule]\nmax_off_policy_steps = 3\nnum_generations = 4\n[learner]\nlr = 1e-4")
    assert (config.schedule.max_staleness, config.schedule.group_size) == (3, 4)
    assert config.learner.learning_rate == 1e-4


def test_both_names_of_one_key_are_refused() -> None:
    assert "schedule.max_staleness and schedule.max_off_policy_steps are two names of one key; keep one" in refusal(
        "[schedule]\nmax_staleness = 1\nmax_off_policy_steps = 1"
    )


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: there is no such configuration file"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "binary.toml")
    (tmp_path / "broken.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match=r"broken\.toml is not TOML: .*line 1"):
        load_config(tmp_path / "broken.toml")


def test_a_configuration_built_in_code_is_checked_too() -> None:
    good = load_config(None, text=MINIMAL)
    check_config(good)
    with pytest.raises(ConfigError, match=r"run\.steps = 0 is not allowed"):
        check_config(Config(model=good.model, reward=good.reward, run=RunConfig(steps=0)))
    with pytest.raises(ConfigError, match="both set"):
        check_config(Config(model=good.model, reward=RewardConfig(function="a:b", address="grpc://c:1")))
