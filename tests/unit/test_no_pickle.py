"""K-007: no module of ours can unpickle, and none loads a file with torch in a way that could."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "pickletools"}
MODULES = sorted(
    path for name in ("actors", "buffers", "clients", "engine", "src") for path in (ROOT / name).rglob("*.py")
)


def unsafe(source: str) -> list[str]:
    """What in a module could execute what it reads."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.partition(".")[0] in UNPICKLING]
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in UNPICKLING:
                found.append(module)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                safe = any(
                    word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value is True
                    for word in keywords
                )
                found += [] if safe else ["torch.load"]
            case ast.keyword(arg="allow_pickle" | "trust_remote_code", value=value):
                is_off = isinstance(value, ast.Constant) and value.value is False
                found += [] if is_off else [str(node.arg)]
            case _:
                pass
    return found


def test_no_pickle_no_module_imports_what_executes_what_it_reads() -> None:
    assert len(MODULES) > 100
    assert {str(path.relative_to(ROOT)): unsafe(path.read_text()) for path in MODULES if unsafe(path.read_text())} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from cloudpickle import loads",
        "import torch\ntorch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "auto.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert unsafe(source)
    assert unsafe("torch.load(path, weights_only=True)") == []
