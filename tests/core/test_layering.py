"""The shape of the code: sizes of files and functions, what a plugin's entry module imports, recipes that load.

What the core may import is in test_import_budget.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_core.config import load
from miles_core.discovery import discover
from miles_core.wiring import check_requirements

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
PYTHON = sorted(
    path
    for folder in ("miles_core", "miles_cli", "plugins", "scripts", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if not any(part.startswith(".") or part in ("build", "standins") for part in path.relative_to(ROOT).parts)
)
LONGER = {"miles_core/types.py": 480, "miles_core/interfaces.py": 430, "miles_core/session.py": 430}
"""Files that are longer than they should be, and how long they may be until they are split. The first two are the contract,
nearly all docstrings. No file may be added, and no number raised."""
RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))
ENTRY_MODULES = sorted(ROOT.glob("plugins/*/miles_*/__init__.py"))
HEAVY = {"torch", "transformers", "ray", "sglang", "megatron", "deepspeed", "triton"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def long_functions(source: str) -> list[tuple[str, int]]:
    """(name, lines) of every function longer than MAX_FUNCTION_LINES, counted from `def` to its last line."""
    return [
        (node.name, lines)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def imported_at_once(tree: ast.AST) -> Iterator[str]:
    """Top-level names that importing a module imports: what stands outside functions and `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (name for other in node.orelse for name in imported_at_once(ast.Module([other], [])))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imported_at_once(node)


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_files_and_functions_stay_short(path: Path):
    source = path.read_text("utf-8")
    if "tests" not in path.parts:  # a file of tests may be as long as its subject has cases
        assert source.count("\n") <= LONGER.get(name_of(path), MAX_FILE_LINES)
    assert long_functions(source) == []


def test_files_that_have_become_short_are_no_exception_any_more():
    assert [name for name in LONGER if (ROOT / name).read_text("utf-8").count("\n") <= MAX_FILE_LINES] == []


@pytest.mark.parametrize("path", ENTRY_MODULES, ids=name_of)
def test_a_plugins_entry_module_imports_nothing_heavy(path: Path):
    assert not HEAVY & set(imported_at_once(ast.parse(path.read_text("utf-8"))))


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_recipe_loads(path: Path):
    missing = {"quickstart.toml": {"torch-rollout", "fsdp-trainer", "hf-models", "hf-tokenizer", "policy-losses"}}
    if absent := missing.get(path.name, set()) - {info.name for info in discover()}:
        pytest.skip(f"not installed: {', '.join(sorted(absent))}")
    check_requirements(load(path))


def test_the_measure_of_functions_sees_methods_and_counts_their_lines():
    body = "\n".join(["        x = 1"] * 60)
    source = f"class A:\n    @property\n    def long(self):\n{body}\n    def short(self):\n        pass\n"
    assert long_functions(source) == [("long", 61)]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch.nn", {"torch"}),
        ("def f():\n    import torch", set()),
        ("class A:\n    from torch import nn", {"torch"}),
        ("try:\n    import ray\nexcept ImportError:\n    ray = None", {"ray"}),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import json", {"json"}),
        ("from . import torch", set()),
    ],
)
def test_imports_at_once_are_those_outside_functions(source: str, names: set[str]):
    assert set(imported_at_once(ast.parse(source))) == names
