"""The same mathematics in plain torch and transformers, on one process, sample by sample, written without any of the
core's batching: what the real stack must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from miles_core.types import Sample


def load(folder: Path, *, critic: bool = False) -> torch.nn.Module:
    auto = AutoModelForTokenClassification if critic else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def logprobs(model: torch.nn.Module, tokens: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    """[T]; entry t is the log-probability of token t after those before it, 0 for the first."""
    ids = torch.as_tensor(tokens, dtype=torch.long)
    table = (model(ids[None]).logits[0].float() / temperature).log_softmax(-1)
    return torch.cat([table.new_zeros(1), table[:-1].gather(1, ids[1:, None])[:, 0]])


def values(model: torch.nn.Module, tokens: np.ndarray) -> torch.Tensor:
    """[T]; entry t is the value of the state in which token t was chosen, 0 for the first."""
    out = model(torch.as_tensor(tokens, dtype=torch.long)[None]).logits[0, :, 0]
    return torch.cat([out.new_zeros(1), out[:-1]])


def sequence_ratio_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    old: Sequence[torch.Tensor],
    advantages: Sequence[float],
    clip: float,
) -> tuple[float, float]:
    """One clipped optimizer step on the token mean of the loss of plugin_losses.sequence_ratio; (loss, gradient norm)."""
    count = sum(int(s.loss_mask.sum()) for s in samples)
    optimizer.zero_grad()
    total = torch.zeros(())
    for sample, before, advantage in zip(samples, old, advantages, strict=True):
        mask = torch.as_tensor(sample.loss_mask)
        ratio = (logprobs(model, sample.tokens, sample.temperature) - before)[mask].mean().exp()
        worse = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        # row t of a transition-aligned side channel belongs to input token t; the last token is never an input
        trust = torch.cat([torch.as_tensor(sample.extras["trust"]), torch.zeros(1)])
        total = total - (worse * trust[mask]).sum() / count
    return _step(model, optimizer, total)


def gae(values: np.ndarray, reward: float, gamma: float, lam: float) -> np.ndarray:
    """float64[M] over the trainable tokens: A_t = r_t + gamma V_(t+1) - V_t + gamma lambda A_(t+1), reward at the end."""
    advantages, running, after = np.zeros(len(values)), 0.0, 0.0
    for t in reversed(range(len(values))):
        running = (reward if t == len(values) - 1 else 0.0) + gamma * after - float(values[t]) + gamma * lam * running
        advantages[t], after = running, float(values[t])
    return advantages


def value_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: Sequence[Sample], returns: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """One clipped optimizer step on the token mean of (value - return)^2 / 2; (loss, gradient norm)."""
    optimizer.zero_grad()
    total = torch.zeros(())
    for sample, target in zip(samples, returns, strict=True):
        total = total + (values(model, sample.tokens)[torch.as_tensor(sample.loss_mask)] - target).square().sum() / 2
    return _step(model, optimizer, total / sum(int(s.loss_mask.sum()) for s in samples))


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> tuple[float, float]:
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), norm.item()
