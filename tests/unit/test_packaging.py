"""The lists that must agree so that the same package is built, installed, type-checked and tested."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "headrace"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKS = sorted(path.name for path in SOURCES.iterdir() if path.is_symlink())


def test_every_link_leads_to_the_folder_of_its_name() -> None:
    assert LINKS == ["actors", "buffers", "clients", "engine"]
    for name in LINKS:
        assert os.readlink(SOURCES / name) == f"../../{name}"
        assert (ROOT / name / "__init__.py").is_file()


def test_a_top_level_package_stands_in_every_list() -> None:
    build = PROJECT["tool"]["hatch"]["build"]["targets"]
    real = ["src/headrace/__init__.py", "src/headrace/py.typed", "src/headrace/v1"]
    assert sorted(set(build["wheel"]["only-include"]) - set(real)) == LINKS
    assert build["wheel"]["sources"] == {"src/headrace": "headrace"} | {name: f"headrace/{name}" for name in LINKS}
    assert {f"/src/headrace/{name}" for name in LINKS} <= set(build["sdist"]["exclude"])
    checked = [name.removeprefix("src/headrace/") for name in PROJECT["tool"]["pyright"]["include"]]
    assert sorted(checked) == sorted(["__init__.py", *LINKS])
    banned = PROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert sorted(banned) == LINKS
    layers = " | ".join(PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]).split(" | ")
    assert sorted(layers) == sorted([f"headrace.{name}" for name in [*LINKS, "v1"]])


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for name in LINKS for path in (ROOT / name).rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_every_entry_point_leads_to_a_definition() -> None:
    points = [value for group in PROJECT["project"]["entry-points"].values() for value in group.values()]
    for value in [*points, *PROJECT["project"]["scripts"].values()]:
        module, _, name = value.partition(":")
        file = ROOT / "src" / (module.replace(".", "/") + ".py")
        assert file.is_file(), f"{value}: there is no {file.relative_to(ROOT)}"
        defined = {
            node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
        assert name in defined, value


def test_no_module_is_named_for_nothing_in_particular() -> None:
    vague = {"utils.py", "common.py", "helpers.py", "misc.py"}
    assert [str(path) for name in LINKS for path in (ROOT / name).rglob("*.py") if path.name in vague] == []


def test_tools_are_pinned_and_dependencies_have_ranges() -> None:
    assert all("==" in tool for tool in PROJECT["dependency-groups"]["dev"])
    needed = list(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        needed += extra
    assert [name for name in needed if "==" in name or ">=" not in name] == []


def test_the_core_needs_neither_torch_nor_vllm() -> None:
    assert not any(name.startswith(("torch", "transformers", "vllm")) for name in PROJECT["project"]["dependencies"])


def test_contributing_names_the_traps_of_the_layout() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for trap in ["one link and five list entries", "source files", "import engine", "pip check", "--no-deps"]:
        assert trap in text, trap


@pytest.mark.full
def test_the_wheel_imports_in_a_fresh_environment(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    program = """
import importlib.util, headrace, headrace.engine.errors, headrace.engine.clock
names = ["actors", "buffers", "clients", "engine", "v1"]
assert all(importlib.util.find_spec("headrace." + name) for name in names)
from importlib.resources import files
assert files("headrace").joinpath("py.typed").is_file()
assert files("headrace").joinpath("v1/buffer_pb2_grpc.py").is_file()
assert files("headrace").joinpath("clients/cli/main.py").is_file()
print(headrace.__version__, importlib.util.find_spec("engine"))
"""
    out = subprocess.check_output([str(python), "-c", program], text=True, cwd=tmp_path)
    assert out.split() == [PROJECT["project"]["version"], "None"]


@pytest.mark.full
def test_the_core_alone_runs_the_command_line(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT, check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", str(wheel)], check=True)
    run = [str(python), "-m", "headrace.clients.cli.main"]
    assert b"group_size = 8" in subprocess.check_output([*run, "config", "schema"], cwd=tmp_path)
    assert b"records encode_us" in subprocess.check_output([*run, "bench", "records"], cwd=tmp_path)
    heavy = "import importlib.util as u; print([n for n in ('torch', 'transformers', 'vllm') if u.find_spec(n)])"
    assert subprocess.check_output([str(python), "-c", heavy], text=True, cwd=tmp_path).strip() == "[]"
