"""docs/errors.md shows what Miles really prints. UPDATE_DOCS=1 writes the present messages into the page instead."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from pages import ROOT, Block, blocks, read

from miles_cli.main import main
from miles_core import discovery, errors

PAGE = "docs/errors.md"
INSTALLED = {
    "miles-core",
    "miles-fsdp-trainer",
    "miles-hf-models",
    "miles-hf-tokenizer",
    "miles-math-reward",
    "miles-policy-losses",
    "miles-reasoning-gym",
    "miles-torch-rollout",
}
"""The distributions that the page speaks of; what else happens to be installed is not seen."""
HOME, STAMP = "/home/me/miles", "20260801-120000"
COMMANDS = [b for b in blocks(read(PAGE), "console")]


def command_of(block: Block) -> str:
    return block.text.partition("\n")[0].removeprefix("$ ")


def shown(command: str, output: str, code: int) -> str:
    return f"$ {command}\n{output.rstrip()}\n$ echo $?\n{code}\n"


def normalised(text: str, folder: Path) -> str:
    """Without what differs from run to run: the folder, the time in the run folder's name."""
    return re.sub(r"-\d{8}-\d{6}", f"-{STAMP}", text.replace(str(folder), HOME))


def matches(expected: str, actual: str) -> bool:
    """Equal, where a line that is only `...` stands for any lines."""
    pattern = "".join(
        "(?:.*\n)*" if line.strip() == "..." else re.escape(line) for line in expected.splitlines(keepends=True)
    )
    return re.fullmatch(pattern, actual) is not None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recipes and the files that the page shows, and an environment of the page's plugins."""
    (tmp_path / "recipes").mkdir()
    for name in ("toy", "quickstart"):  # these two alone: a message lists what lies beside them
        shutil.copy(ROOT / f"recipes/{name}.toml", tmp_path / "recipes")
    for block in blocks(read(PAGE)):
        if block.info:
            (tmp_path / block.info).write_text(block.text, "utf-8")
    found = [d for d in metadata.distributions() if discovery.normalise(d.metadata["Name"] or "") in INSTALLED]
    missing = INSTALLED - {discovery.normalise(d.metadata["Name"]) for d in found}
    if missing:
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")
    monkeypatch.setattr(discovery.metadata, "distributions", lambda: iter(found))
    for name in ("MILES_PLUGINS", "MILES_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_here(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, int]:
    """What a command prints on standard error (without log lines, which pytest takes), and its exit code."""
    with pytest.raises(SystemExit) as end:
        main(shlex.split(command)[1:])
    for name in [n for n in sys.modules if n.startswith("miles_plugin_file_")]:
        del sys.modules[name]
    return capsys.readouterr().err, int(end.value.code or 0)


def run_apart(command: str) -> tuple[str, int]:
    """The same in a process of its own, for commands that send signals."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    arguments = [sys.executable, "-m", "miles_cli.main", *shlex.split(command)[1:]]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=environment)
    return result.stderr, result.returncode


def outcome(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    output, code = run_apart(command) if "stop.py" in command else run_here(command, capsys)
    return shown(command, normalised(output, folder), code)


@pytest.mark.parametrize("block", COMMANDS, ids=command_of)
def test_the_page_shows_what_is_printed(block: Block, folder: Path, capsys: pytest.CaptureFixture[str]):
    actual = outcome(command_of(block), folder, capsys)
    if os.environ.get("UPDATE_DOCS") and not matches(block.text, actual):
        text = read(PAGE)
        (ROOT / PAGE).write_text(text.replace(f"```console\n{block.text}```", f"```console\n{actual}```"), "utf-8")
        return
    assert matches(block.text, actual), f"{PAGE} is stale (UPDATE_DOCS=1 writes it); now:\n{actual}"


def test_the_page_lists_the_exit_codes():
    codes = {v for k, v in vars(errors).items() if k.startswith("EXIT_")}
    assert {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", read(PAGE))} == codes


def test_every_failing_exit_code_has_an_example():
    codes = {v for k, v in vars(errors).items() if k.startswith("EXIT_")} - {errors.EXIT_OK}
    assert {int(b.text.splitlines()[-1]) for b in COMMANDS} == codes


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\nb\n", "a\nc\n", False),
        ("a\n  ...\nd\n", "a\nb\nc\nd\n", True),
        ("a\n  ...\nd\n", "a\nb\nc\n", False),
    ],
)
def test_a_stale_message_is_noticed(expected: str, actual: str, same: bool):
    assert matches(expected, actual) is same
