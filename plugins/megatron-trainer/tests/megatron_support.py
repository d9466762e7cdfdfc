"""Tiny real models, batches, and ranks of both trainers for the tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from miles_core import BuildContext, LossOutput, Sample, TrainBatch
from miles_core.settings import RoleTable, TrainerTable

VOCAB = 61
_SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**_SHAPE, head_dim=8, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=8, tie_word_embeddings=True),
    "qwen3-untied": Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=False),
}


def make_model(folder: Path, name: str) -> Path:
    """Random weights, norms and biases too."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def random_batch(*, groups=3, per_group=4, seed=0, temperature=1.0, **more):
    """Groups with prompts that begin alike, completions of which some begin alike, and off-policy columns."""
    rng = np.random.default_rng(seed)
    system, samples = rng.integers(2, VOCAB, 5), []
    for g in range(groups):
        prompt = np.concatenate([system, rng.integers(2, VOCAB, rng.integers(1, 5))])
        for i in range(per_group):
            completion = rng.integers(2, 6, rng.integers(1, 8))
            tokens = np.concatenate([prompt, completion]).astype(np.int32)
            samples.append(
                Sample(
                    group_id=f"g{g}",
                    trajectory_id=f"g{g}/{i}",
                    index=i,
                    tokens=tokens,
                    prompt_len=len(prompt),
                    loss_mask=np.arange(len(tokens)) >= len(prompt),
                    logprobs=np.zeros(len(tokens), np.float32),
                    temperature=temperature,
                )
            )
    masks = [s.loss_mask.copy() for s in samples]
    total = sum(int(m.sum()) for m in masks)
    columns = {
        "advantages": [np.where(m, rng.normal(), 0).astype(np.float32) for m in masks],
        "old_logprobs": [np.where(m, -4 + rng.normal(size=len(m)), 0).astype(np.float32) for m in masks],
    }
    weights = {"policy": [np.full(len(m), 1 / total, np.float32) for m in masks]}
    return TrainBatch(samples=samples, columns=columns, token_weights=weights, mask=masks, **more)


def weighted_policy(x):
    """-A * logp - 0.1 * entropy: linear in the advantage, no clip that could hide a difference."""
    return LossOutput(per_token=-x.advantages * x.get("logprobs") - 0.1 * x.get("entropy"))


PG = ("pg", weighted_policy)
NEEDS = frozenset({"logprobs", "entropy"})


ADAM = {"lr": 1e-2, "adam_eps": 1e-5}
"""Adam divides by the root of the second moment: with a smaller epsilon, rounding would show where a gradient is near 0."""


def context_of(folder, losses, *, roles=(), needs=NEEDS, index=0, world_size=1, rendezvous="", steps=10):
    """`roles`: names, or a mapping from names to options of their tables."""
    run = SimpleNamespace(
        steps=steps,
        train=SimpleNamespace(minibatches=1, epochs=1),
        trainer=TrainerTable(use="megatron", num_workers=world_size, timeout_s=120.0),
        roles={name: RoleTable(**(roles[name] if isinstance(roles, dict) else {})) for name in roles},
        loss=[SimpleNamespace(weight=entry[2] if len(entry) > 2 else 1.0) for entry in losses],
    )
    kinds = {"loss": [entry[:2] for entry in losses]}
    return BuildContext(
        component="trainer/any",
        run_dir=Path(folder),
        seed=0,
        run_config=run,
        model_path=Path(folder),
        index=index,
        world_size=world_size,
        rendezvous=rendezvous,
        device="cpu",
        needs=frozenset(needs),
        select=lambda kind: kinds.get(kind, []),
    )


def megatron_rank(folder, losses=(PG,), *, args=None, options=None, start=True, **context):
    from miles_megatron_trainer import MegatronConfig, miles_trainers

    (component,) = miles_trainers()
    config = MegatronConfig(args={**ADAM, **(args or {})}, **(options or {}))
    rank = component.build(config, context_of(folder, losses, **context))
    if start:
        rank.start()
    return rank


def fsdp_rank(folder, losses=(PG,), **context):
    from miles_fsdp_trainer import FsdpConfig, miles_trainers

    (component,) = miles_trainers()
    rank = component.build(FsdpConfig(lr=ADAM["lr"], eps=ADAM["adam_eps"]), context_of(folder, losses, **context))
    rank.start()
    return rank


def exported(rank):
    """{name: tensor} of what a rank publishes."""
    found = {}
    for bucket in rank.export("hf_full", 4096):
        for spec in bucket.tensors:
            dtype = getattr(torch, spec.dtype)
            size = int(np.prod(spec.shape)) * dtype.itemsize
            found[spec.name] = bucket.data[spec.offset : spec.offset + size].view(dtype).view(spec.shape).clone()
    return found
