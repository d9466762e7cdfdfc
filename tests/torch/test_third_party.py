"""A stranger's plugin, from its wheel: `examples/third-party` is built, installed into an empty folder, found and run."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "third-party"
TORCH_RUN = """
name = "acme"
steps = 2
plugins = ["acme-algorithms", "torch-rollout", "fsdp-trainer"]
model.path = "{model}"
tokenizer.use = "toy"
data.use = "toy"
engine.use = "torch"
[rollout]
groups_per_step = 4
samples_per_group = 4
sampling.max_new_tokens = 3
[train]
minibatches = 2
[trainer]
use = "fsdp"
fsdp.lr = 0.01
[[reward]]
use = "parity"
[[advantage]]
use = "acme-rank"
[[loss]]
use = "acme-squared-log-ratio"
acme-squared-log-ratio.strength = 2.0
"""
PARITY = """
import miles_core

@miles_core.reward("parity")
def parity(sample):
    return float(sample.tokens.sum() % 2)  # half of all answers, so that there is something to learn from
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the installed wheel."""
    pytest.importorskip("setuptools", reason="building a wheel needs setuptools in this environment")
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    tree = source / "third-party"
    subprocess.run(["cp", "-r", str(EXAMPLE), str(tree)], check=True)  # a build leaves files behind
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(source), str(tree)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = source.glob("acme_algorithms-1.0.0-*.whl")
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    return site


def miles(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "miles_cli.main", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)


def metrics(out: Path) -> list[dict]:
    (file,) = out.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return [row for row in rows if "reward/mean" in row]


def test_the_example_is_short():
    """A loss and an advantage in under 40 lines, a reward in five, all of it counted with imports and docstrings."""
    text = (EXAMPLE / "acme_algorithms" / "__init__.py").read_text("utf-8")
    assert len(text.splitlines()) < 40
    (reward,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == "first_token")
    assert reward.end_lineno - reward.decorator_list[0].lineno + 1 <= 5


def test_it_is_listed_without_being_imported(site):
    shown = miles(site, "plugins", "info", "acme-algorithms")
    assert shown.returncode == 0, shown.stderr
    for name in ("acme-rank", "acme-squared-log-ratio", "acme-first-token"):
        assert name in shown.stdout


def test_its_advantage_and_reward_train_the_toy(site, tmp_path):
    done = miles(site, "run", str(EXAMPLE / "toy.toml"), "--out", str(tmp_path), "--set", "steps=25")
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [row["reward/mean"] for row in metrics(tmp_path)]
    assert rewards[0] < 0.3 and sum(rewards[-5:]) / 5 > 0.7


def test_its_loss_trains_a_torch_model(site, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from miles_core.testing.toy_kit import TOKENIZER

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=TOKENIZER.vocab_size, num_key_value_heads=2, **shape)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    file = tmp_path / "run.toml"
    file.write_text(TORCH_RUN.format(model=tmp_path / "model"), "utf-8")
    (tmp_path / "parity.py").write_text(PARITY, "utf-8")
    done = miles(site, "run", str(file), "--out", str(tmp_path / "runs"), "--plugin-file", str(tmp_path / "parity.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    name = "loss/acme-squared-log-ratio/distance"
    distances = [row[name] for row in metrics(tmp_path / "runs") if name in row]
    assert distances and all(0 < d < 1 for d in distances)  # 0 in the first minibatch of a step, more in the second
