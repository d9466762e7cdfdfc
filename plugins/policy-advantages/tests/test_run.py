"""Whole runs on the toy model: columns, greedy answers and the order of a chain as the loop provides them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CONFIG = """
name = "toy"
steps = 1
seed = 3
plugins = ["policy-advantages"]
tokenizer.use = "toy"
data.use = "toy"
engine.use = "toy"
[rollout]
groups_per_step = 4
samples_per_group = 4
sampling.max_new_tokens = 3
[trainer]
use = "toy"
[[reward]]
use = "toy"
[[loss]]
use = "policy-gradient"
[[advantage]]
"""
CHAINS = [
    ('use = "remax"\n[[advantage]]\nuse = "whiten"\n', ["remax/zero", "remax/baseline", "remax/no_baseline", "whiten/std"]),
    ('use = "reinforce-pp"\nreinforce-pp.kl_coef = 0.1\n[roles.reference]\n', ["reinforce-pp/kl", "reinforce-pp/std"]),
]


def miles_run(tmp_path, chain: str) -> subprocess.CompletedProcess[str]:
    config = tmp_path / "toy.toml"
    config.write_text(CONFIG + chain)
    command = [sys.executable, "-m", "miles_cli.main", "run", str(config), "--out", str(tmp_path / "out")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(("chain", "metrics"), CHAINS, ids=["remax", "reinforce-pp"])
def test_a_run_logs_every_advantage_of_its_chain(tmp_path, chain, metrics):
    done = miles_run(tmp_path, chain)
    assert done.returncode == 0, done.stdout + done.stderr
    (log,) = (tmp_path / "out").glob("*/metrics.jsonl")
    row = [json.loads(line) for line in log.read_text().splitlines()][-1]
    assert not [name for name in metrics if f"advantage/{name}" not in row], row


def test_distillation_without_a_teacher_is_bad_usage(tmp_path):
    done = miles_run(tmp_path, 'use = "on-policy-distillation"\n')
    assert done.returncode == 2
    assert 'advantage "on-policy-distillation"' in done.stderr + done.stdout
    assert "add a table [roles.teacher]" in done.stderr + done.stdout
