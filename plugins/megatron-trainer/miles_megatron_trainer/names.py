"""Megatron's parameters of a dense Llama, Qwen2 or Qwen3, and the Hugging Face tensors that they hold, both ways.

The plan is computed from config.json alone, so every rank knows each name, shape and owner without asking. Letters: V
vocabulary, E hidden size; `tp` tensor-parallel ranks; `stages` pipeline stages with the same number of layers each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from miles_core.errors import ConfigError

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def has_qk_norm(hf: Mapping[str, Any]) -> bool:
    return hf["family"] == "qwen3"


def has_qkv_bias(hf: Mapping[str, Any]) -> bool:
    return hf["family"] == "qwen2"


def read_config(folder: Path, where: str) -> dict[str, Any]:
    """config.json with "family", "head_dim", "num_key_value_heads" and "rope_theta" filled in. Raises ConfigError that
    starts with `where` for a folder that is no model, or a model whose mathematics is not this trainer's."""
    from miles_fsdp_trainer import check_model_folder

    check_model_folder(folder, where)
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (name, *_) = hf["architectures"]
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{where}: trainer megatron has no {name}",
            f"it has {', '.join(ARCHITECTURES)}",
            'trainer.use = "fsdp" takes any causal language model of transformers',
        )
    hf["family"] = ARCHITECTURES[name]
    hf["head_dim"] = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    hf["num_key_value_heads"] = hf.get("num_key_value_heads") or hf["num_attention_heads"]
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    hf["rope_theta"] = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    wrong = [
        (rope.get("rope_type", rope.get("type", "default")) != "default", "scaled rotary positions"),
        (rope.get("partial_rotary_factor", 1.0) != 1.0, "partial rotary positions"),
        (hf.get("use_sliding_window"), "sliding-window attention"),
        (hf["family"] != "qwen2" and hf.get("attention_bias"), "attention biases"),
        (hf.get("mlp_bias"), "MLP biases"),
        (hf.get("hidden_act", "silu") != "silu", f"the activation {hf.get('hidden_act')}"),
    ]
    if found := [text for bad, text in wrong if bad]:
        raise ConfigError(f"{where}: trainer megatron does not support {', '.join(found)}", 'use trainer.use = "fsdp"')
    return hf


@dataclass(frozen=True, slots=True)
class Weight:
    """One Megatron parameter. `kind` says how ranks share it: "copy" all the same; "vocab" rows of the padded vocabulary;
    "columns" a part of that axis; "qkv" the rows of whole key-value groups, each as (its queries, key, value); "gated"
    (gate part, up part)."""

    name: str
    """Under Megatron's name, with the layer's index inside its stage."""
    stage: int
    hf: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and full shapes in the Hugging Face folder."""
    kind: str
    groups: int = 1
    """Key-value groups of "qkv"."""
    padded: int = 0
    """Rows of "vocab" over all ranks."""

    @property
    def numel(self) -> int:
        """Numbers in the full tensors."""
        return sum(prod(shape) for _, shape in self.hf)


def plan(hf: Mapping[str, Any], stages: int, padded_vocab: int) -> list[Weight]:
    """Every parameter of the model, in the order of the network. A tied output layer is not among them: it is the
    embedding, of which Megatron keeps a copy on the last stage (`tied_copy`)."""
    layers, hidden, ffn = hf["num_hidden_layers"], hf["hidden_size"], hf["intermediate_size"]
    vocab, width = hf["vocab_size"], hf["head_dim"]
    queries, keys = hf["num_attention_heads"] * width, hf["num_key_value_heads"] * width
    table = (("model.embed_tokens.weight", (vocab, hidden)),)
    weights = [Weight("embedding.word_embeddings.weight", 0, table, "vocab", padded=padded_vocab)]
    for layer in range(layers):
        stage, local = divmod(layer, layers // stages)
        theirs, own = f"model.layers.{layer}.", f"decoder.layers.{local}."
        rows = (("q", queries), ("k", keys), ("v", keys))
        projections = tuple((f"{theirs}self_attn.{n}_proj.weight", (size, hidden)) for n, size in rows)
        gate = tuple((f"{theirs}mlp.{n}_proj.weight", (ffn, hidden)) for n in ("gate", "up"))
        output, down = f"{theirs}self_attn.o_proj.weight", f"{theirs}mlp.down_proj.weight"
        qkv, groups = f"{own}self_attention.linear_qkv", hf["num_key_value_heads"]
        weights += [
            _norm(f"{own}input_layernorm", stage, f"{theirs}input_layernorm", hidden),
            Weight(f"{qkv}.weight", stage, projections, "qkv", groups),
        ]
        if has_qkv_bias(hf):
            biases = tuple((f"{theirs}self_attn.{n}_proj.bias", (size,)) for n, size in rows)
            weights.append(Weight(f"{qkv}.bias", stage, biases, "qkv", groups))
        if has_qk_norm(hf):
            weights += [
                _norm(f"{own}self_attention.{n}_layernorm", stage, f"{theirs}self_attn.{n}_norm", width) for n in "qk"
            ]
        weights += [
            Weight(f"{own}self_attention.linear_proj.weight", stage, ((output, (hidden, queries)),), "columns"),
            _norm(f"{own}pre_mlp_layernorm", stage, f"{theirs}post_attention_layernorm", hidden),
            Weight(f"{own}mlp.linear_fc1.weight", stage, gate, "gated"),
            Weight(f"{own}mlp.linear_fc2.weight", stage, ((down, (hidden, ffn)),), "columns"),
        ]
    weights.append(_norm("decoder.final_layernorm", stages - 1, "model.norm", hidden))
    if not hf.get("tie_word_embeddings"):
        head = (("lm_head.weight", (vocab, hidden)),)
        weights.append(Weight("output_layer.weight", stages - 1, head, "vocab", padded=padded_vocab))
    return weights


def tied_copy(weights: Sequence[Weight], stages: int) -> Weight | None:
    """The last stage's copy of a tied embedding, or None."""
    if stages == 1 or any(weight.name == "output_layer.weight" for weight in weights):
        return None
    first = weights[0]
    return Weight("output_layer.weight", stages - 1, first.hf, first.kind, padded=first.padded)


def shard(weight: Weight, tensors: Sequence[torch.Tensor], tp: int, rank: int) -> torch.Tensor:
    """What tensor-parallel rank `rank` holds of the full Hugging Face tensors; the rows that pad a vocabulary are 0."""
    if weight.kind == "columns":
        return tensors[0].chunk(tp, dim=1)[rank]
    if weight.kind == "vocab":
        (table,) = tensors
        padding = table.new_zeros(weight.padded - len(table), *table.shape[1:])
        return torch.cat([table, padding]).chunk(tp)[rank]
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
    if weight.kind == "vocab":
        ((_, shape),) = weight.hf
        return [torch.cat(list(shards))[: shape[0]]]
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
