"""Tiny random models of real architectures, and engines that serve them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from miles_core.types import GenerateRequest, SamplingParams  # noqa: E402
from miles_torch_rollout import TorchEngineConfig  # noqa: E402
from miles_torch_rollout.engine import TorchEngine  # noqa: E402

VOCAB = 96
CONTEXT = 640
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.3, eos_token_id=1, bos_token_id=0,
)  # fmt: skip
MOE = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-untied": lambda: transformers.LlamaConfig(
        **SHAPE, tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SHAPE, **MOE, tie_word_embeddings=False),
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def make(name: str, seed: int = 0) -> Path:
        folder = root / f"{name}-{seed}"
        if not folder.exists():
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():  # biases and norms that start as constants would hide mistakes
                    if parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter), alpha=0.1)
            model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def reference() -> Callable[..., np.ndarray]:
    """Log-probabilities float32[T] of a sequence by the model's own forward pass: one sequence, no cache, no batch."""
    models: dict[Path, Any] = {}

    def score(folder: Path, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        if folder not in models:
            models[folder] = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(models[folder](tokens[None]).logits[0] / temperature, dim=-1)
        out = np.zeros(len(ids), dtype=np.float32)
        out[1:] = logprobs[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
        return out

    return score


@pytest.fixture
def serve() -> Callable[..., Any]:
    @asynccontextmanager
    async def started(folder: Path, **options: Any) -> AsyncIterator[TorchEngine]:
        own = {name: options.pop(name) for name in ("max_context", "make_decode") if name in options}
        engine = TorchEngine(folder, TorchEngineConfig(device="cpu", **options), **own)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    return started


@pytest.fixture
def ask() -> Callable[..., GenerateRequest]:
    def request(id: str, prompt: Any, seed: int = 0, **params: Any) -> GenerateRequest:
        params = {"max_new_tokens": 8, "ignore_eos": True, **params}
        return GenerateRequest(
            id=id, token_ids=np.asarray(prompt, dtype=np.int32), params=SamplingParams(**params), seed=seed
        )

    return request


@pytest.fixture
def prompt() -> Callable[..., np.ndarray]:
    return lambda length, seed=0: np.random.default_rng([7, seed, length]).integers(2, VOCAB, length, dtype=np.int32)


@pytest.fixture
def until() -> Callable[..., Any]:
    """Waits until the engine has sampled that many tokens of some running request."""

    async def sampled(engine: TorchEngine, count: int) -> None:
        for _ in range(4000):
            if any(len(run.tokens) >= count for run in list(engine._batch.running)):
                return
            await asyncio.sleep(0.002)
        raise AssertionError(f"no running request has {count} tokens")

    return sampled
