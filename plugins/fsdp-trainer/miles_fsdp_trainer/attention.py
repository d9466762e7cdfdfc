"""Attention over a token tree, registered with transformers under one name, so that any model that goes through its
attention interface runs on packed rows without a [N, N] mask.

Letters: N packed tokens, H heads, G key-value heads, D head size; B, Q, K as in `tree.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from miles_core.errors import ConfigError
from miles_fsdp_trainer.tree import Block, TokenTree, attention_blocks

NAME = "miles-tree"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@dataclass(slots=True)
class DeviceBlock:
    """A `Block` on the device, with its masks by sliding window (None: the whole path)."""

    block: Block
    queries: torch.Tensor
    keys: torch.Tensor
    masks: dict[tuple[int | None, torch.dtype], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive [B, 1, Q, K], or None where plain causal attention is right; made once per microbatch."""
        if window is not None and window >= self.block.num_keys.max():
            window = None
        if self.block.causal and window is None:
            return None
        if (window, dtype) not in self.masks:
            device = self.queries.device
            query = torch.as_tensor(self.block.query_positions, device=device)[:, :, None]
            key = torch.arange(self.block.keys.shape[1], device=device)
            seen = (key <= query) & (key < torch.as_tensor(self.block.num_keys, device=device)[:, None, None])
            if window is not None:
                seen &= key > query - window
            mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
            self.masks[window, dtype] = mask[:, None]
        return self.masks[window, dtype]


@dataclass(slots=True)
class AttentionPlan:
    """How the N tokens of one packed row attend; passed to the model as the keyword `miles_plan`."""

    blocks: list[DeviceBlock]
    inverse: torch.Tensor

    @classmethod
    def of(cls, tree: TokenTree, device: torch.device) -> AttentionPlan:
        blocks, inverse = attention_blocks(tree)
        move = [
            DeviceBlock(
                block,
                torch.as_tensor(block.queries.ravel(), device=device),
                torch.as_tensor(block.keys.ravel(), device=device),
            )
            for block in blocks
        ]
        return cls(move, torch.as_tensor(inverse, device=device))


def tree_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    miles_plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, N, D], key and value [1, G, N, D] -> [1, N, H, D]. Without a plan: ordinary causal attention.

    Raises ConfigError for what it would silently leave out: attention dropout, logit soft-capping, attention sinks.
    """
    if miles_plan is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    odd = [name for name in UNSUPPORTED if kwargs.get(name) is not None] + ["dropout"] * (dropout > 0)
    if odd:
        raise ConfigError(f"trainer fsdp: packing does not support attention with {', '.join(odd)}", "set packing = false")
    query_n, key_n, value_n = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = []
    for block in miles_plan.blocks:
        mask = block.mask(sliding_window, query.dtype)
        q, k, v = (
            x.index_select(0, index).unflatten(0, shape).transpose(1, 2)
            for x, index, shape in (
                (query_n, block.queries, block.block.queries.shape),
                (key_n, block.keys, block.block.keys.shape),
                (value_n, block.keys, block.block.keys.shape),
            )
        )
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return rows.index_select(0, miles_plan.inverse)[None], None


def register() -> None:
    """Makes the name known to transformers; safe to call again."""
    AttentionInterface.register(NAME, tree_attention)
