"""Tiny real models, batches and ranks for the tests, and a plain-torch reference of the same mathematics."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

import miles_policy_losses
from miles_core import BuildContext, LossOutput, Sample, TrainBatch
from miles_core.settings import RoleTable
from miles_fsdp_trainer import FsdpConfig, miles_trainers

VOCAB = 61
_SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, initializer_range=0.3, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
CONFIGS = {
    "llama-tied": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama": LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**_SHAPE, tie_word_embeddings=True),
    "qwen2-window": Qwen2Config(
        **{k: v for k, v in _SHAPE.items() if k != "head_dim"},
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    ),
}


def make_model(folder: Path, name: str) -> Path:
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).save_pretrained(folder)
    return folder


def sample(group, index, prompt, completion, *, mask=None, temperature=1.0):
    tokens = np.array([*prompt, *completion], dtype=np.int32)
    loss_mask = np.zeros(len(tokens), dtype=bool)
    loss_mask[len(prompt) :] = True if mask is None else mask
    return Sample(
        group_id=group,
        trajectory_id=f"{group}/{index}",
        index=index,
        tokens=tokens,
        prompt_len=len(prompt),
        loss_mask=loss_mask,
        logprobs=np.zeros(len(tokens), np.float32),
        temperature=temperature,
    )


def batch_of(samples, *, seed=0, weights=None, scope="policy", **more):
    """A batch with random advantages and off-policy old log-probabilities; token-mean weights unless given."""
    rng = np.random.default_rng(seed)
    masks = [s.loss_mask.copy() for s in samples]
    total = max(sum(int(m.sum()) for m in masks), 1)
    columns = {
        "advantages": [np.where(m, rng.normal(), 0).astype(np.float32) for m in masks],
        "old_logprobs": [np.where(m, -4 + rng.normal(size=len(m)), 0).astype(np.float32) for m in masks],
    }
    columns |= {k: v for k, v in more.pop("columns", {}).items()}
    weights = weights or [np.full(len(m), 1 / total, np.float32) for m in masks]
    return TrainBatch(samples=samples, columns=columns, token_weights={scope: weights}, mask=masks, **more)


def random_batch(*, groups=3, per_group=4, seed=0, longest=7, temperature=1.0, **more):
    """Groups with prompts that begin alike, and completions of which some are equal or begin alike."""
    rng = np.random.default_rng(seed)
    system = rng.integers(2, VOCAB, 5)
    samples = []
    for g in range(groups):
        prompt = np.concatenate([system, rng.integers(2, VOCAB, rng.integers(1, 5))])
        for i in range(per_group):
            completion = rng.integers(2, 6, rng.integers(1, longest + 1))  # four token ids: common beginnings are frequent
            samples.append(sample(f"g{g}", i, prompt, completion, temperature=temperature))
    return batch_of(samples, seed=seed, **more)


def component_loss(name, **options):
    component = {c.name: c for c in miles_policy_losses.miles_losses()}[name]
    return name, component.build(component.config(**options), None)


def negative_logprob(x):
    """Cross-entropy: the gradient of every trained token counts, unclipped."""
    return LossOutput(per_token=-x.get("logprobs"), metrics={"nll": (-x.get("logprobs").sum(), x.mask.sum(), "mean")})


NLL = ("nll", negative_logprob)


def weighted_policy(x):
    """-A * logp, linear in the advantage; no clip that could hide a difference."""
    return LossOutput(per_token=-x.advantages * x.get("logprobs"))


PG = ("pg", weighted_policy)


def rank_of(
    folder, losses=(PG,), *, roles=(), needs=(), index=0, world_size=1, rendezvous="", steps=10, start=True, **options
):
    """`roles`: names, or a mapping from names to options of their tables."""
    run = SimpleNamespace(
        steps=steps,
        train=SimpleNamespace(minibatches=1, epochs=1),
        roles={name: RoleTable(**(roles[name] if isinstance(roles, dict) else {})) for name in roles},
        loss=[SimpleNamespace(weight=entry[2] if len(entry) > 2 else 1.0) for entry in losses],
    )
    kinds = {"loss": [entry[:2] for entry in losses]}
    context = BuildContext(
        component="trainer/fsdp",
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
    (component,) = miles_trainers()
    rank = component.build(FsdpConfig(**{"lr": 1e-2, **options}), context)
    if start:
        rank.start()
    return rank


def parameters(rank, role="policy"):
    from miles_fsdp_trainer.weights import full

    return {n: full(p).clone() for n, p in rank.roles[role].model.named_parameters()}


def gradients(rank, batch):
    """The gradient of one step before clipping: caught by standing in for the optimizer's own step."""
    optimizer = rank.roles["policy"].optimizer
    caught = {}

    def catch(self, norm):
        caught.update({n: p.grad.clone() for n, p in optimizer.named.items() if p.grad is not None})
        optimizer.zero_grad()

    optimizer.step = partial(catch, optimizer)
    report = rank.step(batch)
    del optimizer.step
    return report, caught


def reference_logprobs(model, sample):
    """float32 [T] by the model's own forward, one sample alone, at the sample's temperature."""
    ids = torch.as_tensor(sample.tokens.astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1] / sample.temperature
    chosen = logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    return torch.cat([torch.zeros(1), chosen])


def reference_loss(model, batch):
    """The loss PG over a batch, one sample at a time, without packing, chunks or microbatches."""
    total = torch.zeros(())
    for i, s in enumerate(batch.samples):
        w = torch.as_tensor(batch.token_weights["policy"][i] * batch.columns["advantages"][i] * batch.mask[i])
        total = total - (w * reference_logprobs(model, s)).sum()
    return total


def plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def close(a, b, *, rtol=1e-5, atol=1e-6):
    """Equal to fp32 rounding: `atol` is in units of the largest entry of all tensors, or of 1 if that is smaller."""
    assert a.keys() == b.keys()
    atol *= max(1.0, *(float(v.abs().max()) for v in b.values()))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
