"""Samplers in whole toy runs, also across a resume."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import pytest

from miles_cli.run import run_command

RUN = """
name = "toy"
steps = 10
seed = 5
plugins = ["curriculum"]
tokenizer.use = "toy"
engine.use = "toy"
checkpoint.every = 2
checkpoint.keep = 10
checkpoint.save_model = false
[data]
use = "toy"
toy.num_prompts = 24
[rollout]
groups_per_step = 4
samples_per_group = 4
sampling.max_new_tokens = 2
[trainer]
use = "toy"
toy.lr = 0.1
[[reward]]
use = "exact-match"
[[loss]]
use = "policy-gradient"
[sampler]
"""
OPTIONS = {
    "difficulty": "difficulty = {max_repeats = 0.4, rest_steps = 1, keep_far = 0.2}",
    "drop-solved": "drop-solved = {solved = 0.5, keep = 0.0}",
}


def run(folder, name, resume=None):
    config = folder / "run.toml"
    config.write_text(f'{RUN}use = "{name}"\n{OPTIONS[name]}\n')
    run_command(config, out=folder / "out", resume=str(resume) if resume else None)
    return next(iter((folder / "out").iterdir()))


def trained(folder):
    """Step -> [prompt id, draw] of what was trained, in order."""
    rows = [json.loads(line) for line in (folder / "trained.jsonl").read_text().splitlines()]
    return {row["step"]: [tuple(s[:2]) for s in row["samples"] if s[2] == 0] for row in rows}


@pytest.mark.parametrize("name", ["difficulty", "drop-solved"])
@pytest.mark.parametrize("at", [2, 6])
def test_a_resumed_run_picks_what_the_uninterrupted_one_does(tmp_path, name, at):
    whole = run(tmp_path, name)
    before = trained(whole)
    assert {len(groups) for groups in before.values()} == {4}
    for folder in (whole / "checkpoints").iterdir():
        if int(folder.name.rpartition("-")[2]) > at:
            shutil.rmtree(folder)
    run(tmp_path, name, resume=whole)
    assert trained(whole) == before


def test_difficulty_repeats_prompts_as_draws_of_their_own(tmp_path):
    steps = trained(run(tmp_path, "difficulty"))
    draws = [draw for groups in steps.values() for draw in groups]
    assert len(set(draws)) == len(draws) == 40
    # 24 prompts: within the first epoch a second draw of one is a repeat, at most 40% of all picks.
    early = Counter(prompt for step in range(1, 6) for prompt, _ in steps[step])
    assert 0 < sum(n - 1 for n in early.values()) <= 0.4 * 20
