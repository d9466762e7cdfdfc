"""Process group and Megatron's parallel state: both belong to the process, and ranks of one process share them."""

from __future__ import annotations

import argparse
import datetime
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from miles_core import BuildContext
from miles_core.errors import ConfigError

_users = 0


def join(context: BuildContext, args: argparse.Namespace, device: torch.device) -> None:
    """Meets the other ranks. Raises ConfigError when this process already belongs to another layout."""
    global _users
    if not dist.is_initialized():
        limit = datetime.timedelta(seconds=context.run_config.trainer.timeout_s)
        backend = "nccl" if device.type == "cuda" else "gloo"
        meet: dict[str, Any] = (
            {"init_method": context.rendezvous} if context.world_size > 1 else {"store": dist.HashStore()}
        )
        dist.init_process_group(backend, rank=context.index, world_size=context.world_size, timeout=limit, **meet)
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(tp, pp, context_parallel_size=cp)
        tensor_parallel.model_parallel_cuda_manual_seed(context.seed)
    here = (
        dist.get_world_size(),
        mpu.get_tensor_model_parallel_world_size(),
        mpu.get_pipeline_model_parallel_world_size(),
        mpu.get_context_parallel_world_size(),
    )
    wanted = (context.world_size, tp, pp, cp)
    if here != wanted:
        raise ConfigError(
            "trainer megatron: this process already holds ranks of another layout",
            f"world, tensor, pipeline and context sizes are {here}, and {wanted} are asked for",
        )
    _users += 1


def leave() -> None:
    """The last one closes the door."""
    global _users
    _users -= 1
    if _users == 0 and dist.is_initialized():
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
