"""What the spike's tests share: tiny models, samples, and one event loop in a thread that lasts as long as they do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForTokenClassification

from miles_core.types import Prompt, Sample, SampleGroup, VersionSpan

VOCAB = 256


def write_model(folder: Path, *, critic: bool = False, seed: int = 0) -> Path:
    """A Qwen3 of 4 layers with random weights, large enough (0.1) for log-probabilities to differ by nats."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.1,
        rms_norm_eps=1e-6,
        bos_token_id=1,
        eos_token_id=2,
        num_labels=1,
        use_cache=True,
    )
    model = (Qwen3ForTokenClassification if critic else Qwen3ForCausalLM)(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


class Loop:
    """An event loop in a thread of its own: worker processes ask the kernel to end with the thread that started them."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="spike-loop", daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 300.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


def make_groups(seed: int, num_groups: int = 4, size: int = 4, temperature: float = 0.8) -> list[SampleGroup]:
    """Groups of random tokens with random rewards; responses of 4 to 11 tokens of which some are not trained (as if a
    tool had written them), and a side channel "trust" in [0, 1] per input token."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(num_groups):
        prompt = Prompt(id=f"p{g}", text="-")
        start = rng.integers(3, VOCAB, size=int(rng.integers(3, 8)))
        samples = [_sample(rng, f"p{g}@0", i, start, temperature) for i in range(size)]
        groups.append(SampleGroup(id=f"p{g}@0", prompt=prompt, samples=samples, num_samples=size))
    return groups


def _sample(rng: np.random.Generator, group: str, index: int, start: np.ndarray, temperature: float) -> Sample:
    count = int(rng.integers(4, 12))
    tokens = np.concatenate([start, rng.integers(3, VOCAB, size=count)]).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(start)
    mask[len(start) + 2] = index % 2 == 0
    return Sample(
        group_id=group,
        trajectory_id=f"{group}/{index}",
        index=index,
        tokens=tokens,
        prompt_len=len(start),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=(VersionSpan(start=len(start), stop=len(tokens), version=0),),
        temperature=temperature,
        reward=float(rng.random()),
        extras={"trust": rng.random(len(tokens) - 1).astype(np.float32)},
    )


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text("utf-8"))
