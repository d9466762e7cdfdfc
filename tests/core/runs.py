"""Runs of the toy recipe in a process of their own, which may be killed and resumed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
name = "toy"
steps = 8
seed = 3
plugins = []
tokenizer.use = "toy"
data.use = "toy"
engine.use = "toy"
checkpoint.every = 2
[rollout]
groups_per_step = 4
samples_per_group = 4
sampling.max_new_tokens = 3
[trainer]
use = "toy"
toy.lr = 0.05
[[reward]]
use = "toy"
[[loss]]
use = "policy-gradient"
"""


def write_config(folder: Path, more: str = "") -> Path:
    path = folder / "config.toml"
    path.write_text(CONFIG + more)
    return path


def command(config: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "miles_cli.main", "run", str(config), "--out", str(out), *more]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **more}


def run(
    config: Path, out: Path, *more: str, kill_after: float | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs to the end, or SIGKILLs it `kill_after` seconds after its run folder has come to be."""
    process = subprocess.Popen(
        command(config, out, *more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(**env)
    )
    if kill_after is not None:
        while process.poll() is None and not list(out.glob("*/run.json")):
            time.sleep(0.005)
        time.sleep(kill_after)
        process.kill()
    output, _ = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, output, "")


def run_dir(out: Path) -> Path:
    (folder,) = out.iterdir()
    return folder


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model/model.safetensors").read_bytes()).hexdigest()


def trained(folder: Path) -> dict[int, list[Sequence[object]]]:
    """Step -> [prompt id, draw, sample index] of everything that was trained, in the surviving history."""
    rows = [json.loads(line) for line in (folder / "trained.jsonl").read_text("utf-8").splitlines()]
    assert len({row["step"] for row in rows}) == len(rows), "a step was trained twice in the surviving history"
    return {row["step"]: row["samples"] for row in rows}
