"""PPO with a critic from the config to the last checkpoint, on a tiny torch model and the toy's task."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
from pathlib import Path

import numpy as np
import pytest

from miles_core.config import load
from miles_core.driver import drive, new_run_dir, write_run_files
from miles_core.errors import ConfigError, MilesError
from miles_core.testing.toy_kit import TOKENIZER
from miles_core.view import RunView
from miles_core.wiring import check_requirements
from tests.core import runs

torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
pytest.importorskip("miles_fsdp_trainer")
pytest.importorskip("miles_policy_losses")

EVEN = """
import miles_core
from miles_core.types import CorrectionOutput

@miles_core.reward("even")
def even(sample):
    answer = sample.tokens[sample.prompt_len:]
    return 0.5 * float((answer % 2 == 0).mean()) + 0.05 * int(sample.prompt.label)

@miles_core.correction("nothing")
def nothing(inputs):
    return CorrectionOutput(mask=[mask & False for mask in inputs.mask])
"""
"""The share of even tokens, half of which are so at first, and the first digit of the prompt: what the policy can learn,
and what only the critic can."""
STEPS = 20
CONFIG = """
name = "ppo"
steps = {steps}
seed = 1
plugins = ["torch-rollout", "fsdp-trainer", "policy-losses"]
model.path = "{model}"
tokenizer.use = "toy"
data.use = "toy"
engine.use = "torch"
[rollout]
groups_per_step = 16
samples_per_group = 4
sampling.max_new_tokens = 3
[train]
minibatches = 2
epochs = 2
[trainer]
use = "fsdp"
fsdp.device = "cpu"
fsdp.lr = 0.01
fsdp.critic_lr = 0.005
fsdp.max_tokens = 256
[roles.critic]
{critic}
[[reward]]
use = "even"
[[advantage]]
use = "gae"
gae.lam = 1.0
[[loss]]
use = "ppo-clip"
[[loss]]
use = "value"
value.clip = 0.5
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """One layer of width 32, which attends to both digits: enough to repeat the first."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=TOKENIZER.vocab_size, num_key_value_heads=4, max_position_embeddings=64, initializer_range=0.1, **shape
    )
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def resolved(folder: Path, model: Path, *sets: str, steps: int = 4, critic: str = "", text: str = CONFIG):
    file = folder / "ppo.toml"
    file.write_text(text.format(model=model, steps=steps, critic=critic), "utf-8")
    (folder / "even.py").write_text(EVEN, "utf-8")
    return load(file, sets=sets, files=[folder / "even.py"])


def trained(folder: Path, model: Path, *sets: str, **more) -> list[dict]:
    """The metrics of each step of a run in this process."""
    run = resolved(folder, model, *sets, **more)
    check_requirements(run)
    run_dir = new_run_dir(folder / "runs", run.config.name)
    write_run_files(run, run_dir)
    asyncio.run(drive(run, run_dir, RunView()))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row for row in rows if "reward/mean" in row]


def mean(rows, name):
    return np.mean([row[name] for row in rows])


MODES = pytest.mark.parametrize("critic", ["", "shared = true"], ids=["separate", "shared"])


@MODES
def test_ppo_learns_and_so_does_its_critic(model, tmp_path, critic):
    """At first half of the tokens are even and the first digit is 4.5 on average: 0.25 + 0.225; the best is 0.5 + 0.225."""
    rows = trained(tmp_path, model, steps=STEPS, critic=critic)
    assert rows[0]["reward/mean"] < 0.55 and mean(rows[-5:], "reward/mean") > 0.66
    assert mean(rows[-5:], "critic/loss") < 0.2 * rows[0]["critic/loss"]
    assert rows[0]["critic/value_mean"] == 0 and rows[0]["critic/explained_variance"] == pytest.approx(0, abs=1e-6)
    assert mean(rows[-5:], "critic/explained_variance") > 0.3
    assert 0 <= rows[-1]["critic/loss/value/clip_fraction"] <= 1
    assert rows[-1]["critic/loss"] == pytest.approx(rows[-1]["critic/loss/value/value"], rel=1e-5)


class Calls:
    """What the rank was asked: `forward` as (role, outputs), `step` as (role, batch)."""

    def __init__(self, monkeypatch):
        from miles_fsdp_trainer.rank import FsdpRank

        self.forward: list[tuple[str, frozenset[str]]] = []
        self.step: list[tuple[str, object]] = []
        forward, step = FsdpRank.forward, FsdpRank.step

        def forwarded(rank, batch, role, outputs):
            self.forward.append((role, outputs))
            return forward(rank, batch, role, outputs)

        def stepped(rank, batch, role="policy"):
            self.step.append((role, batch))
            return step(rank, batch, role)

        monkeypatch.setattr(FsdpRank, "forward", forwarded)
        monkeypatch.setattr(FsdpRank, "step", stepped)


@MODES
def test_columns_are_computed_once_per_step_and_stay_through_minibatches_and_epochs(model, tmp_path, monkeypatch, critic):
    calls = Calls(monkeypatch)
    trained(tmp_path, model, "transport.verify=false", steps=2, critic=critic)  # verifying is a forward pass of its own
    logprobs, values = frozenset({"logprobs"}), frozenset({"values"})
    passes = [("policy", logprobs | values)] if critic else [("critic", values), ("policy", logprobs)]
    assert sorted(calls.forward, key=str) == sorted(passes * 2, key=str)
    roles = [role for role, _ in calls.step]
    assert roles == (["policy"] if critic else ["policy", "critic"]) * 8  # 2 steps x 2 minibatches x 2 epochs
    seen: dict[tuple, list] = {}
    for role, batch in calls.step:
        for i, sample in enumerate(batch.samples):
            row = np.concatenate([batch.columns[name][i] for name in ("old_values", "returns", "advantages")])
            seen.setdefault((role, batch.step, sample.trajectory_id), []).append(row)
    assert len(seen) == (1 if critic else 2) * 2 * 16 * 4  # roles that step x steps x groups x samples
    assert all(len(rows) == 2 and (rows[0] == rows[1]).all() for rows in seen.values())  # one row per epoch


@MODES
def test_the_critic_is_trained_alone_at_first(model, tmp_path, critic):
    rows = trained(tmp_path, model, steps=4, critic=critic + "\nwarmup_steps = 2")
    assert [row["run/optimizer_steps"] for row in rows] == [0, 0, 4, 8]
    assert ["train/loss" in row for row in rows] == [False, False, True, True]
    assert all("critic/loss" in row for row in rows)
    assert rows[1]["critic/loss"] < rows[0]["critic/loss"]


def test_C1_a_killed_run_with_a_critic_ends_with_the_same_weights(model, tmp_path):
    """Killed in the second checkpoint's write, after step 4 of 4: it goes on from step 2."""
    folders = []
    for name, fault in (("whole", {}), ("killed", {"MILES_FAULT": "checkpoint:7"})):
        (tmp_path / name).mkdir()
        resolved(tmp_path / name, model, critic="warmup_steps = 1")
        config, out = tmp_path / name / "ppo.toml", tmp_path / name / "runs"
        more = ["--plugin-file", str(tmp_path / name / "even.py"), "--set", "checkpoint.every=2"]
        done = runs.run(config, out, *more, **fault)
        if fault:
            assert done.returncode == -signal.SIGKILL, done.stdout
            more += ["--resume", str(runs.run_dir(out))]
            done = runs.run(config, out, *more)
        assert done.returncode == 0, done.stdout
        folders.append(runs.run_dir(out))
    files = [hashes(folder) for folder in folders]
    assert files[0].keys() >= {"policy.safetensors", "critic.safetensors", "critic-optimizer.safetensors"}
    assert files[0] == files[1]


def hashes(run_dir: Path) -> dict[str, str]:
    """Of each file of the trainer in the last checkpoint, but for torch's random state: nothing draws from it, and it has
    bytes that mean nothing."""
    folder = max(p.parent for p in run_dir.rglob("critic.safetensors"))
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.stem != "rng"}


def test_a_critic_that_is_missing_is_refused_before_anything_starts(model, tmp_path):
    text = CONFIG.replace("[roles.critic]\n{critic}\n", "")
    with pytest.raises(ConfigError, match=r'advantage "gae" .* needs role/critic(.|\n)*add a table \[roles.critic\]'):
        check_requirements(resolved(tmp_path, model, text=text))
    text = CONFIG.replace('[[loss]]\nuse = "value"\nvalue.clip = 0.5\n', "")
    with pytest.raises(ConfigError, match=r"roles.critic: no selected loss trains the critic"):
        check_requirements(resolved(tmp_path, model, text=text))


# --- Bad numbers -----------------------------------------------------------------------------------------------------


def test_an_engines_log_probability_that_is_not_finite_is_named(model, tmp_path, monkeypatch):
    from miles_torch_rollout.engine import TorchEngine

    generate = TorchEngine.generate

    async def broken(self, request):
        generation = await generate(self, request)
        generation.logprobs[-1] = np.nan
        return generation

    monkeypatch.setattr(TorchEngine, "generate", broken)
    with pytest.raises(MilesError, match=r"engine engine-0, request copy-\d\d@\d+/\d: a log-probability .* is not finite"):
        trained(tmp_path, model)


@pytest.mark.parametrize(("role", "column"), [("policy", "old_logprobs"), ("critic", "old_values")])
def test_a_trainers_column_that_is_not_finite_is_named(model, tmp_path, monkeypatch, role, column):
    from miles_fsdp_trainer.rank import FsdpRank

    forward = FsdpRank.forward

    def broken(rank, batch, asked, outputs):
        rows = forward(rank, batch, asked, outputs)
        if asked == role:
            next(iter(rows.values()))[5][-1] = np.inf
        return rows

    monkeypatch.setattr(FsdpRank, "forward", broken)
    with pytest.raises(MilesError, match=rf"trainer forward of {role} returned {column} inf for sample copy-\d\d@1/1 at"):
        trained(tmp_path, model, "transport.verify=false")


@MODES
def test_F6_a_run_without_a_single_trainable_token_moves_no_weight_and_says_so(model, tmp_path, monkeypatch, critic):
    calls = Calls(monkeypatch)
    text = CONFIG + '[[correction]]\nuse = "nothing"\n'
    rows = trained(tmp_path, model, steps=2, critic=critic, text=text)
    assert [row["run/skipped_steps"] for row in rows] == [4, 8] and rows[-1]["run/optimizer_steps"] == 0
    assert calls.step == []
    assert all(np.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
