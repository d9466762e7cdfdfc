"""Megatron's optimizer and schedule, and the optimizer's state as plain tensors shaped like the parameters."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state as mpu
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from miles_megatron_trainer.arguments import warmup_and_decay
from miles_megatron_trainer.model import fields_of

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW of the policy. `step_count` counts the optimizer steps taken; a skipped step moves nothing."""

    def __init__(self, args: argparse.Namespace, model: Any) -> None:
        self.model, self.step_count = model, 0
        made = get_megatron_optimizer(OptimizerConfig(**fields_of(OptimizerConfig, args)), [model])
        parts = getattr(made, "chained_optimizers", [made])
        assert len(parts) == 1, "one optimizer for a dense model"
        (self.megatron,) = parts
        self.scheduler = _scheduler(args, self.megatron)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.megatron.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        self.model.zero_grad_buffer()
        self.megatron.zero_grad()

    def grad_norm(self) -> float:
        """2-norm of the whole gradient, over all ranks, before clipping."""
        self.megatron.prepare_grads()
        return float(self.megatron.get_grad_norm())

    def step(self) -> None:
        """Clips, steps, and moves the schedule."""
        self.megatron.step()
        self.scheduler.step(increment=1)
        self.step_count += 1

    def restore_count(self, count: int) -> None:
        self.step_count = self.scheduler.num_steps = count
        self.scheduler.step(increment=0)

    # --- state, one parameter at a time; the distributed optimizer's are collective over data-parallel ranks ---

    def _own(self, parameter: torch.nn.Parameter) -> tuple[slice, torch.Tensor | None]:
        """Which part of the flattened parameter this rank steps, and the tensor that the inner optimizer steps."""
        if not isinstance(self.megatron, DistributedOptimizer):
            return slice(0, parameter.numel()), getattr(parameter, "main_param", parameter)
        try:
            part = self.megatron._get_model_param_range_map(parameter)["param"]
        except KeyError:
            return slice(0, 0), None
        group, order = self.megatron.model_param_group_index_map[parameter]
        return slice(part.start, part.end), self.megatron.optimizer.param_groups[group]["params"][order]

    def tensor(self, parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
        """fp32, shaped like this rank's parameter: a moment, or "weights", the master weights that are stepped; gathered
        over data-parallel ranks where they share it."""
        part, main = self._own(parameter)
        own = main if name == "weights" or main is None else self.megatron.optimizer.state[main][name]
        if not isinstance(self.megatron, DistributedOptimizer):
            return own
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if own is not None:
            whole[part] = own.flatten()
        dist.all_reduce(whole, group=mpu.get_data_parallel_group(with_context_parallel=True))
        return whole.view_as(parameter)

    def set_weights(self, parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        """The parameter, and the fp32 weights behind it."""
        parameter.copy_(value)
        part, main = self._own(parameter)
        if main is not None:
            main.copy_(value.flatten()[part].view_as(main))

    def set_moments(self, parameter: torch.nn.Parameter, moments: dict[str, torch.Tensor]) -> None:
        """The reverse of `tensor`, after `restore_count`; without moments the state is that before the first step."""
        part, main = self._own(parameter)
        if main is None:
            return
        state = self.megatron.optimizer.state
        if not moments:
            state.pop(main, None)
            return
        entry = {name: value.flatten()[part].view_as(main).to(main).clone() for name, value in moments.items()}
        if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
            entry["step"] = torch.tensor(float(self.step_count))
        state[main] = entry
        if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
            for group in self.megatron.optimizer.param_groups:
                group["step"] = self.step_count


def _scheduler(args: argparse.Namespace, optimizer: Any) -> OptimizerParamScheduler:
    """Megatron's, counted in optimizer steps where its own script counts samples."""
    warmup, decay = warmup_and_decay(args)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr or 0.0,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=args.train_iters,
        wd_incr_style=args.weight_decay_incr_style,
        wsd_decay_steps=args.lr_wsd_decay_iters,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
