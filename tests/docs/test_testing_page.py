"""docs/testing-plugins.md: its tables are those of the suites, and its examples are collected by pytest and pass."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from pages import ROOT, blocks, read

from miles_core.testing import CONTRACTS

PAGE = read("docs/testing-plugins.md")


def test_the_tables_are_up_to_date():
    spec = importlib.util.spec_from_file_location("contract_rules", ROOT / "scripts" / "contract_rules.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.page(PAGE) == PAGE, "python scripts/contract_rules.py"
    assert script.page(PAGE.replace("kebab", "camel")) == PAGE  # the comparison sees a changed row


def test_every_suite_is_described():
    assert re.findall(r"(?m)^### (\w+Contract)$", PAGE) == list(CONTRACTS)


def test_the_examples_pass(tmp_path: Path):
    files = [block for block in blocks(PAGE, "python") if block.info]
    for block in files:
        (tmp_path / block.info).write_text(block.text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(files) == 3 and re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout
