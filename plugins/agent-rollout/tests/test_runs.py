"""Whole runs of the toy: `tools` learns to use its tool; `agent` trains what a black box reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CONFIG = """
name = "turns"
steps = {steps}
seed = 1
plugins = ["agent-rollout"]
tokenizer.use = "toy"
data.use = "toy"
engine.use = "toy"
[trainer]
use = "toy"
toy.lr = 0.05
[[loss]]
use = "policy-gradient"
[[metric]]
use = "turns"
[rollout]
groups_per_step = {groups}
samples_per_group = 8
sampling.max_new_tokens = 3
"""
TOOLS = """
use = "tools"
[rollout.tools]
tools = ["secret"]
parser = "{here}/agent_secret.py:even_asks"
max_turns = 3
[[reward]]
use = "repeats-secret"
"""
AGENT = """
use = "agent"
[rollout.agent]
agent = "{here}/agent_secret.py:player"
[[reward]]
use = "agent-reported"
"""


def run(tmp_path: Path, rollout: str, **fields) -> list[dict]:
    """Metrics of each step."""
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(**fields) + rollout.format(here=HERE))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-m", "miles_cli.main", "run", str(config), "--out", str(tmp_path / "out")]
    command += ["--plugin-file", str(HERE / "agent_secret.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (folder,) = (tmp_path / "out").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row for row in rows if "reward/mean" in row]


def test_a_policy_learns_to_use_its_tool(tmp_path):
    """At first it asks half of the time (five of ten digits are even), and then says one of ten digits: mean reward 0.05.
    In the end it asks nearly always, and says what it was told."""
    rows = run(tmp_path, TOOLS, steps=30, groups=8)
    rewards = [row["reward/mean"] for row in rows]
    calls = [row["turns/tool_calls"] for row in rows]
    assert sum(rewards[:3]) / 3 < 0.15 and sum(rewards[-5:]) / 5 > 0.7, rewards
    assert sum(calls[-5:]) / 5 > 0.8, calls


def test_a_black_box_is_trained_by_what_it_reports(tmp_path):
    """Two requests per sample, one segment each; the gap between engine and trainer is that of rounding, so that what is
    trained is what was sampled, in the context in which it was."""
    rows = run(tmp_path, AGENT, steps=3, groups=4)
    assert len(rows) == 3
    for row in rows:
        assert (row["turns/num_turns"], row["turns/segments"], row["turns/rewrites"]) == (2.0, 1.0, 0.0)
        assert row["samples"] == 32 and row.get("status/error", 0) == 0
        gap = next(value for name, value in row.items() if name.endswith("max_abs"))
        assert gap == pytest.approx(0, abs=1e-4)
