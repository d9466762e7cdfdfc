"""A run from the config to the last checkpoint: two tensor-parallel ranks as workers of the local launcher, a reference,
two minibatches and two epochs, weights pushed to the engine `torch`; whole, and killed and resumed."""

import hashlib
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import transformers

from miles_core.testing.toy_kit import TOKENIZER

pytest.importorskip("miles_torch_rollout")

EVEN = """
import miles_core

@miles_core.reward("even")
def even(sample):
    answer = sample.tokens[sample.prompt_len:]
    return float((answer % 2 == 0).mean())
"""
"""The share of even tokens: half of them at first."""
CONFIG = """
name = "even"
steps = 6
seed = 1
plugins = ["torch-rollout", "fsdp-trainer", "megatron-trainer", "policy-losses"]
model.path = "{model}"
tokenizer.use = "toy"
data.use = "toy"
engine.use = "torch"
checkpoint.every = 1
[rollout]
groups_per_step = 8
samples_per_group = 4
sampling.max_new_tokens = 3
[train]
minibatches = 2
epochs = 2
[trainer]
use = "megatron"
num_workers = 2
[trainer.megatron]
max_tokens = 128
[trainer.megatron.args]
tensor_model_parallel_size = 2
sequence_parallel = true
lr = 0.01
lr_warmup_iters = 2
lr_warmup_init = 0.001
[roles.reference]
[[reward]]
use = "even"
[[advantage]]
use = "grpo"
[[loss]]
use = "ppo-clip"
[[loss]]
use = "kl"
weight = 0.001
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaConfig(
        vocab_size=TOKENIZER.vocab_size, num_key_value_heads=4, max_position_embeddings=64, initializer_range=0.1, **shape
    )
    transformers.LlamaForCausalLM(model).save_pretrained(folder / "model")
    (folder / "even.py").write_text(EVEN)
    (folder / "even.toml").write_text(CONFIG.format(model=folder / "model"))
    return folder / "even.toml"


def miles(config, out, *more, **env):
    command = [sys.executable, "-m", "miles_cli.main", "run", str(config), "--out", str(out)]
    command += ["--plugin-file", str(config.parent / "even.py"), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", **env}
    return subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200
    )


def only(folder):
    (found,) = folder.iterdir()
    return found


def weights(folder):
    return hashlib.sha256((folder / "model/model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    done = miles(config, out)
    assert done.returncode == 0, done.stdout
    return only(out)


def test_it_learns(whole):
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text("utf-8").splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert len(rewards) == 6
    assert rewards[-1] > rewards[0] + 0.2, rewards  # from a half; 24 optimizer steps


def test_the_saved_model_loads_in_transformers(whole):
    model = transformers.AutoModelForCausalLM.from_pretrained(whole / "model")
    assert model.config.vocab_size == TOKENIZER.vocab_size


def test_C1_a_killed_run_ends_with_the_same_weights(config, whole, tmp_path):
    died = miles(config, tmp_path, MILES_FAULT="checkpoint:12")  # five fault points for each of the first saves: the third
    assert died.returncode == -signal.SIGKILL, died.stdout
    done = miles(config, tmp_path, "--resume", str(only(tmp_path)))
    assert done.returncode == 0, done.stdout
    assert weights(only(tmp_path)) == weights(whole)
