"""Distillation from a teacher's whole distribution, from the config to a policy that has come closer to it."""

from __future__ import annotations

import numpy as np
import pytest

from miles_core.testing.toy_kit import TOKENIZER
from tests.torch.test_ppo import CONFIG, trained

torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")

DISTILL = (
    CONFIG[: CONFIG.index("[roles.critic]")].replace("fsdp.lr = 0.01", "fsdp.lr = 0.02")
    + """
[roles.teacher]
path = "{critic}"
[[loss]]
use = "distill"
[loss.distill]
divergence = "{direction}"
top_k = 8
"""
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Policy and teacher of different shapes; the teacher's distribution is far from flat."""
    torch.set_num_threads(1)
    folders = []
    for name, width, spread in (("policy", 32, 0.1), ("teacher", 24, 0.5)):
        torch.manual_seed(len(folders))
        config = transformers.LlamaConfig(
            vocab_size=TOKENIZER.vocab_size, hidden_size=width, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, initializer_range=spread,
        )  # fmt: skip
        folders.append(tmp_path_factory.mktemp(name))
        transformers.LlamaForCausalLM(config).save_pretrained(folders[-1])
    return folders


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_policy_comes_closer_to_its_teacher_without_any_reward(models, tmp_path, direction):
    policy, teacher = models
    text = DISTILL.replace("{direction}", direction)
    rows = trained(tmp_path, policy, steps=8, critic=str(teacher), text=text)
    distances = [row["loss/distill/value"] for row in rows]
    assert all(np.isfinite(distances)) and distances[0] > 0.3
    assert distances[-1] < 0.6 * distances[0]
