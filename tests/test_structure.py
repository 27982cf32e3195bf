"""The tree keeps its shape: packages, the direction of imports, and what is imported when."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
STAGES = ("export", "calibration", "engines", "runtime", "ci", "cli")  # a model flows from left to right
HEAVY = {
    "accelerate",
    "gguf",
    "jinja2",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
    "polygraphy",
    "pyarrow",
    "safetensors",
    "tensorrt",
    "tokenizers",
    "torch",
    "transformers",
}
MODULES = sorted(path for stage in STAGES for path in (ROOT / stage).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(node: ast.AST) -> Iterator[str]:
    """Absolute names of the modules that one import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide the direction"
        module = node.module or ""
        yield from (f"{module}.{alias.name}" for alias in node.names) if module == "adx" else (module,)


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported by a program, not by a type checker."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from at_import(node.orelse)
            continue
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for block in ("body", "orelse", "finalbody"):
                yield from at_import(getattr(node, block, []))


def wrong_way(stage: str, tree: ast.Module) -> list[str]:
    """Imports of a module in `stage` that lead to a later stage."""
    allowed = STAGES[: STAGES.index(stage) + 1]
    names = [name for node in ast.walk(tree) for name in imported(node)]
    return [name for name in names if name.split(".")[0] == "adx" and name.split(".")[1] not in allowed]


def heavy_at_import(tree: ast.Module) -> list[str]:
    names = (name for node in at_import(tree.body) for name in imported(node))
    return [name for name in names if name.split(".")[0] in HEAVY]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_upstream(path: Path) -> None:
    assert wrong_way(path.relative_to(ROOT).parts[0], ast.parse(path.read_text())) == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_heavy_modules_are_imported_where_they_are_used(path: Path) -> None:
    assert heavy_at_import(ast.parse(path.read_text())) == []


def test_the_checks_above_see_what_they_are_for() -> None:
    source = "import torch\nfrom adx.cli import main\ndef f():\n    import onnx\n    from adx.ci.parity import x\n"
    assert heavy_at_import(ast.parse(source)) == ["torch"]
    assert wrong_way("runtime", ast.parse(source)) == ["adx.cli", "adx.ci.parity"]
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import onnx\n"
    assert heavy_at_import(ast.parse(guarded)) == ["onnx"]


def test_every_package_is_listed() -> None:
    """A package that is not listed imports in an editable install and is missing from the wheel."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [init.parent.relative_to(ROOT) for stage in STAGES for init in (ROOT / stage).rglob("__init__.py")]
    assert sorted(listed) == sorted("adx." + ".".join(folder.parts) for folder in found)
    assert {path.parent for path in MODULES} == {ROOT / folder for folder in found}


def test_every_package_has_its_types_marked() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert all((ROOT / Path(*name.split(".")[1:]) / "py.typed").is_file() for name in listed)


def test_nothing_shadows_the_namespace() -> None:
    """A folder named adx or an __init__.py at the root would take the place of the installed package."""
    assert not (ROOT / "adx").exists()
    assert not (ROOT / "__init__.py").exists()
    assert "adx" not in sys.modules or getattr(sys.modules["adx"], "__file__", None) is None


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_the_environment_is_read_in_one_place(path: Path) -> None:
    """Settings come through options; only the command line reads variables, by the options' own `envvar`."""
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Attribute, ast.Name))
    }
    assert not names & {"environ", "getenv"}
