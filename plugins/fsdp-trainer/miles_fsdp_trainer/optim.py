"""AdamW with warm-up, schedule and clipping, over plain parameters or FSDP's sharded ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from miles_fsdp_trainer import FsdpConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(config: FsdpConfig, peak: float, step: int, total: int) -> float:
    """Learning rate of optimizer step `step` (0-based) out of `total`."""
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    span = max(total - config.warmup_steps - 1, 1)
    done = min((step - config.warmup_steps) / span, 1.0)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


class Optimizer:
    """AdamW of one role. `step` counts the optimizer steps taken; a skipped step moves nothing."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: FsdpConfig, peak_lr: float, total_steps: int
    ):
        self.config, self.peak_lr, self.total_steps, self.step_count = config, peak_lr, total_steps, 0
        self.named = {name: p for name, p in parameters if p.requires_grad}
        decayed = [p for p in self.named.values() if p.dim() >= 2]
        plain = [p for p in self.named.values() if p.dim() < 2]
        groups = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((decayed, config.weight_decay), (plain, 0.0))
            if params
        ]
        self.adamw = torch.optim.AdamW(groups, lr=peak_lr, betas=config.betas, eps=config.eps, fused=True)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.config, self.peak_lr, self.step_count, self.total_steps)

    @property
    def grads(self) -> list[torch.Tensor]:
        return [p.grad for p in self.named.values() if p.grad is not None]

    def step(self, norm: float) -> None:
        """One AdamW step with the gradient clipped to `grad_clip`, given its norm; gradients are freed."""
        if self.config.grad_clip and norm > self.config.grad_clip:
            torch._foreach_mul_(self.grads, self.config.grad_clip / norm)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()
        self.step_count += 1
        self.zero_grad()

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, torch.Tensor]:
        """ "exp_avg.<parameter>" and "exp_avg_sq.<parameter>"; empty before the first step."""
        state = self.adamw.state
        return {f"{m}.{name}": state[p][m] for m in MOMENTS for name, p in self.named.items() if m in state.get(p, {})}

    def restore(self, moments: dict[str, torch.Tensor], step_count: int) -> None:
        """The reverse of `moments`; tensors are laid out like the parameters they belong to."""
        self.step_count = step_count
        self.adamw.state.clear()
        for name, p in self.named.items():
            if f"{MOMENTS[0]}.{name}" in moments:
                entry: dict[str, Any] = {m: moments[f"{m}.{name}"] for m in MOMENTS}
                entry["step"] = torch.tensor(float(step_count), device=p.device)
                self.adamw.state[p] = entry

    def move(self, device: torch.device) -> None:
        """Moments to `device`, to make room for a colocated engine or to come back."""
        for state in self.adamw.state.values():
            for m in MOMENTS:
                state[m] = state[m].to(device)


def grad_norm(optimizers: Iterable[Optimizer]) -> float:
    """2-norm of the gradient that these optimizers step together, over all ranks, fp32."""
    grads = [grad for optimizer in optimizers for grad in optimizer.grads]
    if not grads:
        return 0.0
    norm = torch.nn.utils.get_total_norm(grads)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
