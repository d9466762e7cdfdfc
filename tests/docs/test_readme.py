"""README.md and docs/first-run.md say what is so: the two lines, the plugins, the pins, the run folder, the columns."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
from pages import ROOT, blocks, read, sections

from miles_cli.main import main
from miles_cli.run import run_command
from miles_cli.view import COLUMNS
from miles_core import errors
from miles_core.discovery import discover

README, FIRST_RUN = read("README.md"), read("docs/first-run.md")
QUICKSTART = (
    "python3 -m venv .venv && .venv/bin/pip install -r requirements/quickstart.txt"
    " && .venv/bin/miles run recipes/quickstart.toml\n"
)
TESTS = (
    "python3 -m venv .venv-test && .venv-test/bin/pip install -r requirements/test.txt"
    " && .venv-test/bin/python -m pytest -n 2 --dist loadfile\n"
)
NEEDED = {"torch-rollout", "fsdp-trainer", "hf-models", "hf-tokenizer", "policy-losses", "reasoning-gym"}
"""Plugins of the quickstart."""


def first_cells(table: str) -> list[str]:
    """The first cell of every row, without the heading and the rule under it."""
    return [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")][2:]


def test_the_two_lines_stand_first_and_are_the_whole_of_it():
    assert [b.text for b in blocks(README, "bash")][:2] == [QUICKSTART, TESTS]
    assert blocks(FIRST_RUN, "bash")[0].text == QUICKSTART


def test_the_pin_of_torch_is_that_of_the_requirements():
    (pin,) = re.findall(r"(?m)^torch==\S+$", read("requirements/quickstart.txt"))
    assert set(re.findall(r"torch==[\d.]*\d", README)) == {pin}


def test_the_requirements_name_every_plugin_of_the_table_and_the_table_every_plugin():
    table = sections(README, 2)["Plugins in this repository"]
    named = re.findall(r"\| \[([\w-]+)\]\(plugins/\1/README\.md\)", table)
    assert len(named) == len(first_cells(table))
    assert sorted(named) == sorted(p.name for p in (ROOT / "plugins").iterdir() if (p / "pyproject.toml").is_file())


def test_the_table_names_the_components_of_each_plugin():
    for row in sections(README, 2)["Plugins in this repository"].splitlines():
        if match := re.match(r"\| \[([\w-]+)\]", row):
            index = ROOT / "plugins" / match[1] / f"miles_{match[1].replace('-', '_')}" / "miles-components.json"
            offered = {c["name"] for c in json.loads(index.read_text("utf-8"))["components"]}
            assert set(re.findall(r"`([^`]+)`", row)) == offered, match[1]


def test_the_built_in_components_that_are_named_are_built_in():
    from miles_core.plugins import PluginHost

    text = sections(README, 2)["Plugins in this repository"]
    sentence = text[text.index("Built into the core") : text.index("`miles plugins list`")]
    registry = PluginHost.create(plugins=[]).registry
    kinds = ("data", "rollout", "reward", "filter", "advantage", "loss", "transport", "launcher", "tracker")
    assert set(re.findall(r"`([^`]+)`", sentence)) == {e.name for kind in kinds for e in registry.all(kind)}


def test_the_exit_codes_are_all_there():
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert {int(code) for code in first_cells(sections(README, 2)["Exit codes"])} == codes


def test_python_is_that_of_the_metadata():
    wanted = tomllib.loads(read("pyproject.toml"))["project"]["requires-python"]
    assert f"Python {wanted.removeprefix('>=')} or later" in README


def test_the_reward_of_the_readme_has_five_lines():
    (block,) = blocks(README, "python")
    assert len(block.text.splitlines()) == 5


@pytest.mark.parametrize(("answer", "value"), [("7", 1.5), (" 7 \n", 1.5), ("7 apples", 1.0), ("8", 0.0)])
@pytest.mark.parametrize("page", ["README.md", "docs/first-run.md"])
def test_the_reward_of_the_pages_scores_as_it_says(page: str, answer: str, value: float):
    from types import SimpleNamespace

    (block,) = blocks(read(page), "python")
    names: dict = {"__name__": "brief"}
    exec(block.text, names)
    sample = SimpleNamespace(response=answer, prompt=SimpleNamespace(label="7"))
    assert names["right_and_brief"](sample) == value  # 1 for the right start, and the bonus of 0.5 for nothing else


COMMANDS = sorted(
    {
        line[line.index("miles ") :]
        for page in (README, FIRST_RUN)
        for block in blocks(page, "bash")
        for line in block.text.splitlines()
        if re.match(r"(\S*/)?miles ", line) and "--resume" not in line
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_pages_is_accepted(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    if absent := NEEDED - {info.name for info in discover()}:
        pytest.skip(f"not installed: {', '.join(sorted(absent))}")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    (tmp_path / "brief.py").write_text(blocks(README, "python")[0].text, "utf-8")
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command)[1:]
    if arguments[0] == "run" and not {"--dry-run", "--help"} & set(arguments):
        arguments.append("--dry-run")
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert not end.value.code, capsys.readouterr().err


def test_the_pages_have_commands():
    assert len(COMMANDS) >= 9 and any("--plugin-file" in c for c in COMMANDS)


def test_the_columns_of_the_live_view_are_explained():
    assert first_cells(sections(FIRST_RUN, 2)["The live view"]) == ["step", *(title for title, _ in COLUMNS)]


def test_the_table_of_the_run_folder_is_what_a_run_leaves(tmp_path: Path):
    sets = ["steps=1", "rollout.groups_per_step=1", "eval=[]"]
    assert run_command(ROOT / "recipes/toy.toml", plugins=[], sets=sets, out=tmp_path) == 0
    (run_dir,) = tmp_path.iterdir()
    left = {f"`{p.name}{'/' if p.is_dir() else ''}`" for p in run_dir.iterdir()}
    assert set(first_cells(sections(FIRST_RUN, 2)["The run folder"])) == left


def test_the_numbers_of_the_quickstart_are_those_of_its_recipe():
    recipe = tomllib.loads(read("recipes/quickstart.toml"))
    text = " ".join(sections(FIRST_RUN, 2)["What happens"].split())
    rollout = recipe["rollout"]
    assert f"{recipe['steps']} steps follow. Each takes {rollout['groups_per_step']} problems" in text
    assert f"samples {rollout['samples_per_group']} answers to each" in text
    assert f"asks {recipe['eval'][0]['num_prompts']} problems" in text and f"`{recipe['eval'][0]['name']}`" in text
    assert f'path = "{recipe["model"]["path"]}"' in text
    assert f"accuracy on {recipe['eval'][0]['num_prompts']} prompts" in README
