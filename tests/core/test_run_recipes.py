"""Recipes with a target, and the script that runs and judges them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("run_recipes", ROOT / "scripts" / "run_recipes.py")
run_recipes = importlib.util.module_from_spec(spec)
sys.modules["run_recipes"] = run_recipes
spec.loader.exec_module(run_recipes)

TOY = """
extends = "{root}/recipes/toy.toml"
name = "toy"
tags = ["target_reward={target}"]
plugins = []
eval = []
steps = 6
checkpoint.save_model = false
"""


def recipe(folder: Path, target: float) -> Path:
    file = folder / "toy.toml"
    file.write_text(TOY.format(root=ROOT, target=target), "utf-8")
    return file


def logged(out: Path, rewards: list[float], name: str = "toy-20260101-000000") -> None:
    (out / name).mkdir(parents=True)
    rows = [{"step": i, "reward/mean": r, "step/seconds": 0.5} for i, r in enumerate(rewards, start=1)]
    text = "".join(json.dumps(row) + "\n" for row in [{"step": 0, "eval/digits/reward/mean": 9.0}, *rows])
    (out / name / "metrics.jsonl").write_text(text, "utf-8")


@pytest.mark.parametrize(
    ("rewards", "reached", "passed"),
    [
        ([0.0, 0.5, 0.5, 0.5, 0.5, 0.5], 0.5, True),  # the first of six steps does not count
        ([1.0, 0.5, 0.5, 0.5, 0.5, 0.4], 0.48, False),
        ([1.0, 1.0, 1.0], 1.0, False),  # three of six steps: not complete
        ([], None, False),
    ],
)
def test_the_mean_of_the_last_five_steps_decides(tmp_path, rewards, reached, passed):
    logged(tmp_path / "runs", rewards)
    curve = run_recipes.read_curve(recipe(tmp_path, 0.5), tmp_path / "runs", [])
    assert (curve.reached, curve.passed) == (None if reached is None else pytest.approx(reached), passed)


def test_steps_without_a_reward_are_no_points_but_steps(tmp_path):
    logged(tmp_path / "runs", [0.5] * 5)  # and of the sixth, all groups were dropped
    with next((tmp_path / "runs").glob("*/metrics.jsonl")).open("a") as file:
        file.write(json.dumps({"step": 6, "step/seconds": 0.5}) + "\n")
    curve = run_recipes.read_curve(recipe(tmp_path, 0.5), tmp_path / "runs", [])
    assert curve.passed and curve.steps == [1, 2, 3, 4, 5] and curve.seconds == 3.0


def test_a_run_of_a_longer_name_is_another_recipes(tmp_path):
    logged(tmp_path / "runs", [0.1] * 6)
    logged(tmp_path / "runs", [0.9] * 6, name="toy-large-20260101-000000")
    assert run_recipes.read_curve(recipe(tmp_path, 0.5), tmp_path / "runs", []).reached == pytest.approx(0.1)


def test_the_picture_is_small_and_has_every_curve_and_point(tmp_path):
    curves = [run_recipes.Curve(n, 0.5, list(range(1, 41)), [i / 40 for i in range(40)]) for n in ("a<b", "c")]
    text = run_recipes.picture([*curves, run_recipes.Curve("none", 0.5)])
    lines = ElementTree.fromstring(text).findall("{*}polyline")
    assert [len(line.get("points").split()) for line in lines] == [40, 40, 0]
    assert len(text) < 5000


def test_it_runs_a_recipe_and_says_whether_the_target_was_reached(tmp_path, capfd):
    file, out, picture = recipe(tmp_path, 0.01), tmp_path / "runs", tmp_path / "curves.svg"
    common = [str(file), "--out", str(out), "--picture", str(picture)]
    assert run_recipes.main([*common, "--set", "seed=3"]) == 0
    assert "| toy | 0.01 | " in picture.with_suffix(".md").read_text("utf-8") and picture.is_file()
    recipe(tmp_path, 0.99)
    assert run_recipes.main([*common, "--draw"]) == 1
    assert "error: toy: 0." in capfd.readouterr().err
    assert run_recipes.main([*common, "--set", "trainer.use=nothing"]) == 1


def test_every_recipe_of_the_algorithms_has_a_target_within_reach():
    files = run_recipes.recipes([])
    assert {f.stem for f in files} >= {"grpo", "dr-grpo", "rloo", "gspo", "cispo", "dapo", "ppo", "reinforce-pp"}
    assert all(0.5 <= run_recipes.target_of(f) < 1 for f in files)
