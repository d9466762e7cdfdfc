"""How many keys and values fit, and where weights wait while an engine sleeps."""

from __future__ import annotations

from typing import Any

import torch

CPU_KV_BYTES = 2 << 30

Parked = list[tuple[torch.UntypedStorage, torch.Tensor]]
"""Emptied device storages and their bytes in host memory."""


def kv_budget(model: Any, device: torch.device) -> int:
    """Tokens whose keys and values fit into 2 GB on the CPU, or into half of the free memory on CUDA."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
    free = CPU_KV_BYTES if device.type == "cpu" else torch.cuda.mem_get_info(device)[0] // 2
    return max(1, free // per_token)


def park(model: Any) -> Parked:
    """Moves all parameters to host memory. Tensors stay what they are, views included: only their storages are emptied."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in model.state_dict(keep_vars=True).values()}
    parked = []
    for storage in storages.values():
        parked.append((storage, torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu()))
        storage.resize_(0)
    return parked


def unpark(parked: Parked) -> None:
    """Brings parked parameters back to where they were."""
    for storage, held in parked:
        storage.resize_(held.numel())
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(held)
