"""Both rollouts on the engine `torch` with a tiny random model: what is trained has the model's own log-probabilities."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from agent_demo_agents import ask
from agent_words import END, HERE, agent_group, run_group

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
engine_of = pytest.importorskip("miles_torch_rollout.engine")

SHAPE = dict(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, max_position_embeddings=640, initializer_range=0.3, eos_token_id=END, bos_token_id=0,
)  # fmt: skip
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE), dtype=torch.float32).save_pretrained(
        path
    )
    return path


def scores(folder: Path, samples) -> list[np.ndarray]:
    """Log-probabilities of whole samples by an engine that has seen none of them, one pass each."""

    async def work():
        engine = engine_of.TorchEngine(folder, device="cpu")
        await engine.start()
        try:
            return [row["logprobs"] for row in await engine.score([s.tokens for s in samples])]
        finally:
            await engine.close()

    return asyncio.run(work())


def check(folder: Path, samples, num_turns: int) -> None:
    for sample, row in zip(samples, scores(folder, samples), strict=True):
        assert len(sample.metadata["turns"]) == num_turns and sample.loss_mask.sum() > num_turns
        np.testing.assert_allclose(sample.logprobs[sample.loss_mask], row[sample.loss_mask], atol=1e-4)


@pytest.mark.parametrize("prefix_cache", [4096, 0])
def test_tools_on_the_torch_engine(folder, prefix_cache):
    """Three turns: fp32 rounding apart, each sampled token has the log-probability that one pass over the sample gives."""
    from miles_torch_rollout import TorchEngineConfig

    engine = engine_of.TorchEngine(folder, TorchEngineConfig(prefix_cache_tokens=prefix_cache), device="cpu")
    options = {
        "tools": (f"{HERE}/agent_demo_tools.py:add",),
        "parser": f"{HERE}/agent_demo_tools.py:always",
        "max_turns": 3,
    }
    sampling = {"max_new_tokens": 12, "stop_token_ids": (END, *range(150, 180))}
    group, *_ = run_group("tools", options, engine=engine, num_samples=4, sampling=sampling, max_context=640, seed=5)
    whole = [s for s in group.samples if len(s.metadata["turns"]) == 3]
    assert whole, [s.metadata["turns"] for s in group.samples]
    check(folder, whole, 3)


def test_an_agent_on_the_torch_engine(folder):
    def agent(task, notes):
        messages = [USER]
        for _ in range(3):
            messages += [ask(task, messages), USER]

    engine = engine_of.TorchEngine(folder, device="cpu")
    samples, *_ = agent_group(
        agent, engine=engine, num_samples=3, sampling={"max_new_tokens": 12, "stop_token_ids": (END,)}, max_context=640
    )
    assert {s.trajectory_id for s in samples} == {f"p@0/{i}" for i in range(3)}
    check(folder, [s for s in samples if len(s.metadata["turns"]) == 3], 3)
    assert any(len(s.metadata["turns"]) == 3 for s in samples)
