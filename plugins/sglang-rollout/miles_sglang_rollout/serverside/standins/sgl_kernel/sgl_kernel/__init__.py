"""Stand-in for the CPU: the names that SGLang imports when SGLANG_USE_CPU_ENGINE=1, in plain torch.

It registers no torch.ops, so SGLang finds no AMX kernels and every layer takes its native path.
"""

from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.0.0+cpu.standin"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Writes the cache places of each request's new tokens into its row of the table."""
    at = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *rest: Any,
) -> None:
    """The reverse: reads those places from the table."""
    at = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        out_cache_loc[at : at + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        at += end - start


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"the stand-in for sgl_kernel has no {name}")

    missing.__name__ = name
    return missing
