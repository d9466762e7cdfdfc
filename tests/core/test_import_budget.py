"""What may be imported: nothing heavy by the core at all, and nearly nothing by `--help` and `plugins list`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dists import Dists

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = {"torch", "ray", "transformers", "sglang", "megatron"}
QUICK = {*FORBIDDEN, "numpy", "pydantic", "asyncio"}
"""Not even these for a command that only reads metadata."""

PROGRAM = """
import sys
from miles_cli.main import main
try:
    main({argv!r})
except SystemExit as end:
    assert not end.code, end.code
print("MODULES", *sorted(sys.modules), file=sys.stderr)
"""


def modules_after(argv: list[str], made: Dists) -> set[str]:
    """Top-level modules that `miles ARGV` has imported, with the throw-away plugins installed."""
    path = os.pathsep.join([str(made.root / "site"), str(ROOT)])
    command = [sys.executable, "-c", PROGRAM.format(argv=argv)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=120)
    assert result.returncode == 0, result.stderr
    assert argv != ["plugins", "list"] or "\nacme " in result.stdout  # the plugin was seen
    return {name.partition(".")[0] for name in result.stderr.rpartition("MODULES")[2].split()}


@pytest.mark.parametrize("argv", [["--help"], ["plugins", "list"], ["plugins", "--help"], ["--version"]], ids=" ".join)
def test_quick_commands_import_no_plugin_and_nothing_heavy(dists: Dists, argv: list[str]):
    dists.add("acme", "import numpy")
    dists.add("dash", "import numpy", group="miles.commands", value="miles_dash:app")
    modules = modules_after(argv, dists)
    assert not modules & QUICK
    assert {m for m in modules if m.startswith("miles_")} == {"miles_core", "miles_cli"}


def imported(file: Path) -> set[str]:
    """Top-level names of every import statement in a file, wherever it stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return names


FILES = sorted(p for package in ("miles_core", "miles_cli") for p in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_core_imports_no_heavy_library(file: Path):
    assert not imported(file) & FORBIDDEN


def test_ray_is_imported_in_its_launcher_alone():
    for file in (ROOT / "plugins").rglob("*.py"):
        if "ray-launcher" not in file.parts:
            assert "ray" not in imported(file), file


def test_the_walk_finds_an_import_inside_a_function(tmp_path: Path):
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from torch.nn import functional\n    import ray.util\n")
    assert imported(file) == {"torch", "ray"}
