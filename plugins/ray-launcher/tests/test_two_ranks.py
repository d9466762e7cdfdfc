"""Two ranks of `fsdp-trainer` and an engine `torch` in actors: the weights of two ranks in processes of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.testing.toy_kit import TOKENIZER
from tests.core.runs import run, run_dir, weights

torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
CONFIG = """
name = "two-ranks"
steps = 1
seed = 1
plugins = ["torch-rollout", "fsdp-trainer", "policy-losses", "policy-advantages", "ray-launcher"]
model.path = "{model}"
tokenizer.use = "toy"
data.use = "toy"
[engine]
use = "torch"
[rollout]
groups_per_step = 4
samples_per_group = 4
sampling.max_new_tokens = 3
[trainer]
use = "fsdp"
num_workers = 2
fsdp.device = "cpu"
fsdp.lr = 0.01
fsdp.max_tokens = 256
[[reward]]
use = "toy"
[[loss]]
use = "policy-gradient"
"""


@pytest.fixture(scope="module")
def config(cluster, tmp_path_factory) -> Path:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaConfig(vocab_size=TOKENIZER.vocab_size, max_position_embeddings=64, **shape)
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(model).save_pretrained(folder)
    path = folder / "config.toml"
    path.write_text(CONFIG.format(model=folder))
    return path


def test_two_ranks_in_actors_end_with_the_weights_of_two_local_ones(config, cluster, tmp_path):
    hashes = []
    for launcher in ("local", "ray"):
        result = run(config, tmp_path / launcher, "--set", f"launcher.use={launcher}", RAY_ADDRESS=cluster)
        assert result.returncode == 0, result.stdout
        folder = run_dir(tmp_path / launcher)
        assert (folder / "logs/trainer-1.log").is_file()
        hashes.append(weights(folder))
    assert hashes[0] == hashes[1]
