import functools
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.reward.function import ScoringFunction, load_scoring_function
from headrace.engine.errors import ConfigError
from headrace.engine.types import RewardSample, RewardStatus

SAMPLE = RewardSample(sample_id="s", prompt_text="2 + 2", response_text="4", data={"answer": "4"})


def test_one_parameter_gets_the_sample() -> None:
    assert ScoringFunction(lambda anything: len(anything.prompt_text), "f").call(SAMPLE).value == 5.0


def test_prompt_response_and_data_are_recognised_by_name_and_by_number() -> None:
    def by_name(prompt: str, response: str, data: dict[str, Any], *, strict: bool = True) -> float:
        return float(response == data["answer"])

    def without_data(prompt: str, response: str) -> float:
        return float(len(prompt) + len(response))

    def by_number(question: str, text: str, extra: dict[str, Any]) -> float:
        return float(text == extra["answer"])

    assert [ScoringFunction(f, "f").call(SAMPLE).value for f in (by_name, without_data, by_number)] == [1.0, 6.0, 1.0]


def test_callable_objects_and_partials_are_scoring_functions() -> None:
    class Scorer:
        async def __call__(self, sample: RewardSample) -> float:
            return 1.0

    def scaled(sample: RewardSample, scale: float) -> float:
        return scale

    assert ScoringFunction(Scorer(), "f").form == "async"
    assert ScoringFunction(functools.partial(scaled, scale=2.0), "f").call(SAMPLE).value == 2.0


@pytest.mark.parametrize("function", [lambda a, b, c, d: 0.0, lambda: 0.0, lambda a, b: 0.0])
def test_other_signatures_are_refused_with_what_is_allowed(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"reward\.function 'f' takes .*allowed is \(sample\) or \(prompt, response"):
        ScoringFunction(function, "f")


def test_an_exception_is_an_error_outcome_that_says_where() -> None:
    def fails(sample: RewardSample) -> float:
        raise KeyError("answer")

    outcome = ScoringFunction(fails, "m:f").call(SAMPLE)
    assert outcome.status is RewardStatus.ERROR
    assert outcome.message.startswith("scorer 'm:f' failed on sample 's': KeyError: 'answer' (test_function.py line ")


async def test_a_timeout_error_of_the_scorer_itself_is_an_error_and_not_our_timeout() -> None:
    async def fails(sample: RewardSample) -> float:
        raise TimeoutError("the judge did not answer")

    outcome = await ScoringFunction(fails, "f").call_async(SAMPLE, timeout_s=10.0)
    assert outcome.status is RewardStatus.ERROR and "the judge did not answer" in outcome.message


def test_a_file_is_loaded_by_path_without_running_its_main_part(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 0.75\n")
    script = tmp_path / "scorer.py"
    script.write_text(
        "import neighbour\n"
        "def score(prompt, response, data):\n    return neighbour.VALUE\n"
        "if __name__ == '__main__':\n    raise SystemExit('ran as a script')\n"
    )
    assert load_scoring_function(f"{script}:score").call(SAMPLE).value == 0.75


@pytest.mark.parametrize(
    "spec", ["no_such_module_here:f", "math:no_such_function", "missing.py:score", "nonsense", "math:pi"]
)
def test_what_cannot_be_loaded_is_one_sentence_that_names_the_setting(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.function") as caught:
        load_scoring_function(spec)
    assert spec in str(caught.value) and "\n" not in str(caught.value)
