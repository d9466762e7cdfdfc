"""`scripts/check_plugins.py`: what it finds in a plugin's folder, and the index that it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = """
[project]
name = "miles-acme"
version = "0.1.0"
description = "acme"
requires-python = ">=3.11"
license = "Apache-2.0"
dependencies = ["miles-core>=0.1,<0.3"]
entry-points.miles = {acme = "miles_acme"}
[tool.setuptools.package-data]
miles_acme = ["miles-components.json"]
"""


def check_plugins(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    code = "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import check_plugins as c"
    code += "; sys.exit(c.main(sys.argv[3:], pathlib.Path(sys.argv[2])))"
    command = [sys.executable, "-c", code, str(ROOT / "scripts"), str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.fixture
def acme(tmp_path: Path) -> Path:
    package = tmp_path / "plugins/acme/miles_acme"
    package.mkdir(parents=True)
    (package.parent / "pyproject.toml").write_text(PYPROJECT)
    (package.parent / "README.md").write_text("acme\n")
    (package / "__init__.py").write_text(
        "import miles_core\n@miles_core.reward('acme')\ndef acme(sample):\n    'Likes acme.'\n    return 1.0\n"
    )
    return tmp_path


def test_check_plugins_finds_a_stale_index_and_writes_it(acme: Path):
    first = check_plugins(acme)
    assert first.returncode == 1 and "acme: miles-components.json is stale" in first.stdout
    assert check_plugins(acme, "--write").returncode == 0
    index = json.loads((acme / "plugins/acme/miles_acme/miles-components.json").read_text())
    assert index == {"hook_api": 1, "components": [{"kind": "reward", "name": "acme", "summary": "Likes acme."}]}
    assert check_plugins(acme).returncode == 0


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ('"Apache-2.0"', '"MIT"', "license is 'MIT', and all plugins have 'Apache-2.0'"),
        ('">=3.11"', '">=3.12"', "requires-python is '>=3.12'"),
        ('acme = "miles_acme"', 'acme = "miles_acme:plugin"', "entry points of group"),
        ('"miles-core>=0.1,<0.3"', '"miles-core"', "dependencies lack 'miles-core>=0.1,<0.3'"),
        ('["miles-components.json"]', '["x"]', "package-data lacks"),
    ],
)
def test_check_plugins_finds_what_disagrees(acme: Path, old: str, new: str, finding: str):
    check_plugins(acme, "--write")
    file = acme / "plugins/acme/pyproject.toml"
    file.write_text(PYPROJECT.replace(old, new))
    assert old not in file.read_text()
    result = check_plugins(acme)
    assert result.returncode == 1 and f"acme: {finding}" in result.stdout
