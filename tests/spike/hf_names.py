"""Megatron's parameters of a dense Qwen3 and the Hugging Face tensors that they hold, both ways, over TP and PP.

The plan is computed from the config alone, so every rank knows each name, shape and owner without asking. `stages` are
pipeline stages with the same number of layers each; `tp` is the number of tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Weight:
    """One Megatron parameter. `kind` says how ranks share it: "copy" all the same; "rows", "columns" a part of that axis;
    "qkv" the rows of whole key-value groups, each as (its queries, key, value); "gated" (gate part, up part)."""

    name: str
    """Under Megatron's name, with the layer's index inside its stage."""
    stage: int
    hf: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and full shapes in the Hugging Face folder."""
    kind: str
    groups: int = 1
    """Key-value groups of "qkv"."""

    @property
    def nbytes(self) -> int:
        """Bytes of the full fp32 tensors."""
        return 4 * sum(prod(shape) for _, shape in self.hf)


def plan(config: Mapping[str, Any], stages: int, head: str = "lm_head") -> list[Weight]:
    """Every parameter of the model, in the order of the network. `head` is "lm_head", or "score" for a critic saved as a
    Hugging Face token classifier with one label. Raises ValueError for what this mapping does not cover."""
    if config["model_type"] != "qwen3" or config.get("tie_word_embeddings") or config.get("attention_bias"):
        raise ValueError("this mapping covers dense Qwen3 with untied embeddings and without attention bias")
    layers, hidden, ffn = config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]
    if layers % stages:
        raise ValueError(f"{layers} layers cannot be spread evenly over {stages} stages")
    vocab, width = config["vocab_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    last = stages - 1
    weights = [
        Weight("embedding.word_embeddings.weight", 0, (("model.embed_tokens.weight", (vocab, hidden)),), "rows"),
    ]
    for layer in range(layers):
        stage, local = divmod(layer, layers // stages)
        hf, own = f"model.layers.{layer}.", f"decoder.layers.{local}."
        projections = tuple(
            (f"{hf}self_attn.{n}_proj.weight", (rows, hidden)) for n, rows in (("q", queries), ("k", keys), ("v", keys))
        )
        gate = tuple((f"{hf}mlp.{n}_proj.weight", (ffn, hidden)) for n in ("gate", "up"))
        output, down = f"{hf}self_attn.o_proj.weight", f"{hf}mlp.down_proj.weight"
        weights += [
            _norm(f"{own}input_layernorm", stage, f"{hf}input_layernorm", hidden),
            Weight(f"{own}self_attention.linear_qkv.weight", stage, projections, "qkv", config["num_key_value_heads"]),
            _norm(f"{own}self_attention.q_layernorm", stage, f"{hf}self_attn.q_norm", width),
            _norm(f"{own}self_attention.k_layernorm", stage, f"{hf}self_attn.k_norm", width),
            Weight(f"{own}self_attention.linear_proj.weight", stage, ((output, (hidden, queries)),), "columns"),
            _norm(f"{own}pre_mlp_layernorm", stage, f"{hf}post_attention_layernorm", hidden),
            Weight(f"{own}mlp.linear_fc1.weight", stage, gate, "gated"),
            Weight(f"{own}mlp.linear_fc2.weight", stage, ((down, (hidden, ffn)),), "columns"),
        ]
    weights.append(_norm("decoder.final_layernorm", last, "model.norm", hidden))
    if head == "lm_head":
        weights.append(Weight("output_layer.weight", last, (("lm_head.weight", (vocab, hidden)),), "rows"))
    else:
        weights.append(Weight("output_layer.weight", last, (("score.weight", (1, hidden)),), "copy"))
        weights.append(Weight("output_layer.bias", last, (("score.bias", (1,)),), "copy"))
    return weights


def shard(weight: Weight, tensors: Sequence[torch.Tensor], tp: int, rank: int) -> torch.Tensor:
    """What tensor-parallel rank `rank` holds of the full Hugging Face tensors."""
    if weight.kind == "columns":
        return tensors[0].chunk(tp, dim=1)[rank]
    if weight.kind == "rows":
        return tensors[0].chunk(tp)[rank]
    if weight.kind == "qkv":
        grouped = [t.unflatten(0, (weight.groups, -1)) for t in tensors]
        return torch.cat(grouped, dim=1).chunk(tp)[rank].flatten(0, 1)
    if weight.kind == "gated":
        return torch.cat([t.chunk(tp)[rank] for t in tensors])
    return tensors[0]


def join(weight: Weight, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The full Hugging Face tensors, from what each tensor-parallel rank holds; the reverse of `shard`."""
    if weight.kind == "columns":
        return [torch.cat(list(shards), dim=1)]
    if weight.kind == "rows":
        return [torch.cat(list(shards))]
    if weight.kind == "qkv":
        rows = [shape[0] // weight.groups for _, shape in weight.hf]
        grouped = torch.cat(list(shards)).unflatten(0, (weight.groups, sum(rows)))
        return [part.flatten(0, 1) for part in grouped.split(rows, dim=1)]
    if weight.kind == "gated":
        halves = [piece.chunk(2) for piece in shards]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]
    return [shards[0]]


def _norm(name: str, stage: int, hf: str, size: int) -> Weight:
    return Weight(f"{name}.weight", stage, ((f"{hf}.weight", (size,)),), "copy")
