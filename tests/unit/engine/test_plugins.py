"""Finding implementations by name."""

from importlib.metadata import entry_points

import pytest

from headrace.engine.errors import ConfigError, UsageError
from headrace.engine.plugins import load_entry_point, load_object


def refusal(spec: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_object(spec)
    return str(caught.value)


def test_functions_and_methods_are_found() -> None:
    assert load_object("headrace.engine.errors:ConfigError") is ConfigError
    assert load_object("pathlib:Path.exists").__name__ == "exists"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "spec", ["", "module", "module:", ":function", "a b:c", "a.b:c d", "module:function:more", ".a:b"]
)
def test_another_form_is_refused(spec: str) -> None:
    assert 'write it as "module:function"' in refusal(spec)


def test_a_missing_module_is_named_with_the_nearest_one_beside_it() -> None:
    assert "there is no module headrace.engine.error; did you mean errors?" in refusal(
        "headrace.engine.error:ConfigError"
    )
    assert "there is no module no_such_package" in refusal("no_such_package.inner:function")


def test_a_missing_attribute_is_named_with_the_nearest_one() -> None:
    assert "has no ConfigEror; did you mean ConfigError?" in refusal("headrace.engine.errors:ConfigEror")


def test_a_module_that_needs_another_one_names_that_one(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "needs_absent_part.py").write_text("import absent_part\n")
    (folder / "divides_by_zero.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(folder)
    assert "needs the module absent_part, which is not installed" in refusal("needs_absent_part:function")
    assert "importing divides_by_zero failed with ZeroDivisionError" in refusal("divides_by_zero:function")


def test_an_unknown_entry_point_lists_the_known_ones() -> None:
    known = sorted({point.name for point in entry_points(group="pytest11")})
    with pytest.raises(UsageError) as caught:
        load_entry_point("pytest11", "asynci")
    assert "did you mean asyncio?" in str(caught.value)
    assert str(caught.value).endswith("there are: " + ", ".join(known))
    with pytest.raises(UsageError, match="there are: none is installed"):
        load_entry_point("headrace.no_such_group", "x")


def test_a_path_needs_no_entry_point() -> None:
    assert load_entry_point("headrace.algorithms", "headrace.engine.errors:ConfigError") is ConfigError
