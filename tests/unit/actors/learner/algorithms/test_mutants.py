"""The learning tests fail when a line of a method is wrong: each mutant is a copy of the sources with one line changed.

The mutants stand in mutants.toml.
"""

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[5]
HERE = Path(__file__).parent.relative_to(ROOT)
TESTS = (
    "test_steps.py::test_a_step_is_what_the_paper_says",
    "test_steps.py::test_neither_lengths_nor_order_nor_the_cut_into_micro_batches_change_a_step",
    "test_learning.py::test_a_method_learns_the_bandit",
)


class Mutant(NamedTuple):
    """One wrong line: what kind of mistake it is, the file below actors/learner, the right text and the wrong one."""

    mistake: str
    file: str
    right: str
    wrong: str


def _load_mutants() -> dict[str, list[Mutant]]:
    mutants: dict[str, list[Mutant]] = {}
    for entry in tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())["mutant"]:
        for method in entry.pop("methods"):
            mutants.setdefault(method, []).append(Mutant(**entry))
    return mutants


MUTANTS = _load_mutants()

# Torch is imported once; each mutant is a fork of that process, which imports the package afresh.
RUNNER = """
import json, os, sys, msgspec, numpy, pytest, torch
torch.set_num_threads(1)
folder, log, tests, mutants = json.loads(sys.argv[1])
sys.dont_write_bytecode = True
sys.path.insert(0, folder)
codes = []
for path, right, wrong in mutants:
    source = open(path).read()
    open(path, "w").write(source.replace(right, wrong))
    child = os.fork()
    if child == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1), os.dup2(file, 2)
        os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *tests]))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    open(path, "w").write(source)
print(json.dumps(codes))
"""


def run_mutants(method: str, package: Path, log: Path, mutants: Sequence[Mutant]) -> list[int]:
    """pytest's exit codes of one method's learning tests, with each mutant in turn as headrace."""
    tests = [f"{HERE / test}[{method}]" for test in TESTS]
    changes = [(str(package / "actors" / "learner" / file), right, wrong) for _, file, right, wrong in mutants]
    task = json.dumps((str(package.parent), str(log), tests, changes))
    command = [sys.executable, "-c", RUNNER, task]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=280)
    codes: list[int] = json.loads(done.stdout.splitlines()[-1])
    return codes


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package with its own copy of the learner's sources; all else is linked."""
    copy = tmp_path / "headrace"
    (copy / "actors").mkdir(parents=True)
    source = ROOT / "src" / "headrace"
    for path in source.iterdir():
        if path.name not in ("actors", "__pycache__"):
            (copy / path.name).symlink_to(path.resolve())
    for path in (source / "actors").iterdir():
        if path.name not in ("learner", "__pycache__"):
            (copy / "actors" / path.name).symlink_to(path.resolve())
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree((source / "actors" / "learner").resolve(), copy / "actors" / "learner", ignore=ignored)
    return copy


UNTOUCHED = Mutant("none", "losses/__init__.py", "", "")


@pytest.mark.full
@pytest.mark.parametrize("method", MUTANTS)
def test_every_mutant_is_found(method: str, package: Path, tmp_path: Path) -> None:
    mutants = MUTANTS[method]
    untouched, *codes = run_mutants(method, package, tmp_path / "log", [UNTOUCHED, *mutants])
    assert untouched == 0, (tmp_path / "log").read_text()
    for mutant, code in zip(mutants, codes, strict=True):
        print(f"{method:30} {mutant.mistake:60} {'found' if code == 1 else f'SURVIVED ({code})'}")
    # 1: a test failed. Anything else would be a broken copy, not a mutant that was found.
    assert [mutant.mistake for mutant, code in zip(mutants, codes, strict=True) if code != 1] == []


def test_every_method_has_mutants_of_sign_and_of_mask_or_baseline() -> None:
    for method, mutants in MUTANTS.items():
        kinds = {mutant.mistake.partition(":")[0] for mutant in mutants}
        assert len(mutants) >= 3, method
        assert "sign" in kinds, method
        assert kinds & {"mask", "baseline"}, method
        assert kinds & {"denominator", "detach", "importance", "KL", "reward"}, method


def test_every_mutant_changes_one_line_of_todays_sources() -> None:
    for mutants in MUTANTS.values():
        for _, file, right, wrong in mutants:
            count = (ROOT / "actors" / "learner" / file).read_text().count(right)
            assert count == 1, f"{file} has {right!r} {count} times: write the mutant anew"
            assert right != wrong
