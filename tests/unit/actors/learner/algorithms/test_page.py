"""docs/algorithms.md says what the methods do, and its example runs."""

import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.engine.config import AlgorithmConfig

DOCS = Path(__file__).parents[5] / "docs" / "algorithms.md"


def test_the_page_names_every_method_with_what_its_loss_is_a_mean_over() -> None:
    lines = [line.strip("| ").split(" | ") for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    _, *lines = [cells for cells in lines if len(cells) == 5]
    named = {cells[0].strip("`"): cells[-1].partition(";")[0] for cells in lines}
    methods = {point.name: point.load() for point in entry_points(group="headrace.algorithms")}
    own = {name: getattr(method, "unit", {"dpo": "pair", "sft": "token"}.get(name)) for name, method in methods.items()}
    assert named == own


def test_the_page_names_every_setting() -> None:
    text = DOCS.read_text()
    for key in AlgorithmConfig.__struct_fields__:
        value = getattr(AlgorithmConfig(), key)
        assert (f"`{key}.*`" if isinstance(value, msgspec.Struct) else key) in text, key


def test_the_example_on_the_page_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, str(DOCS), "exec"), names)
    assert names["logprobs"].grad.tolist() == pytest.approx([-0.2 * np.exp(0.1)] * 3 + [0.2 * np.exp(0.1)] * 2)
