"""One role's model on this rank: Megatron-Core's GPTModel over trees of tokens.

A packed row is a tree (miles_fsdp_trainer.tree): every common beginning stands in it once. Megatron's own packing knows
only sequences one after another, so two pieces are ours: a core attention that runs over the tree, put in through the
layer spec, and rotary positions that are given rather than counted. Neither asks for a GPU or for Transformer Engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.training.argument_utils import core_transformer_config_from_args
from torch import nn
from torch.nn import functional

from miles_fsdp_trainer.attention import AttentionPlan, tree_attention
from miles_fsdp_trainer.microbatch import ModelInputs
from miles_megatron_trainer.context import OwnPairs, heads_to_tokens, tokens_to_heads
from miles_megatron_trainer.head import VocabPart, parallel_head

_numbers = itertools.count()
_plans: dict[int, AttentionPlan] = {}
"""Attention plans by number. Megatron hands an attention mask from the model to each layer, also into the recomputation of
an earlier microbatch during a backward pass; the mask that we give is the number of the plan, which is right there too."""


class TreeAttention(nn.Module):
    """Core attention over a tree of tokens, by PyTorch's scaled dot product attention on dense blocks."""

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """query [N', 1, H, D], key and value [N', 1, G, D] -> [N', 1, H * D]; rows past the plan's N are padding: 0."""
        plan = _plans[int(attention_mask)]
        count = len(plan.inverse)
        query, key, value = (tokens_to_heads(x) for x in (query, key, value))
        q, k, v = (x[:count].permute(1, 2, 0, 3) for x in (query, key, value))
        out, _ = tree_attention(self, q, k, v, None, scaling=self.scale, miles_plan=plan)
        padded = functional.pad(out[0], (0, 0, 0, 0, 0, query.shape[0] - count))[:, None]
        return heads_to_tokens(padded).flatten(2)


class GivenPositions(nn.Module):
    """In place of Megatron's rotary embedding: angles of the positions that were set for this pass."""

    def __init__(self, width: int, base: float) -> None:
        super().__init__()
        self.width, self.base = width, base
        self.positions = torch.zeros(0)

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        return len(self.positions)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """fp32 [N', 1, 1, D]"""
        device = self.positions.device
        steps = torch.arange(0, self.width, 2, dtype=torch.float32, device=device) / self.width
        angles = self.positions.float()[:, None] / self.base**steps
        return torch.cat([angles, angles], dim=-1)[:, None, None]


class Norm:
    """RMSNorm whose gradient Megatron sums over tensor ranks when each has a part of the sequence; its own refuses that
    without Transformer Engine or Apex."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        norm = nn.RMSNorm(hidden_size, eps=eps)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


def transformer_config(args: argparse.Namespace) -> Any:
    config = core_transformer_config_from_args(args)
    config.variable_seq_lengths = True  # each microbatch has the length that it needs
    # Token weights did it all: nothing divides by microbatches, tokens or data-parallel ranks.
    config.finalize_model_grads_func = lambda model, num_tokens=None, **kwargs: finalize_model_grads(model, None, **kwargs)
    return config


def build(args: argparse.Namespace, hf: dict[str, Any], device: torch.device, *, trainable: bool) -> Any:
    """A GPTModel, wrapped for gradients if `trainable`; its weights are still random."""
    config = transformer_config(args)
    spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization="RMSNorm")
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    parts.self_attention.submodules.core_attention = TreeAttention
    if args.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = Norm
    layers = [spec] * get_num_layers_to_build(config)
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings")),
        parallel_output=True,
    )
    model.rotary_pos_emb = GivenPositions(args.kv_channels, hf["rope_theta"])
    model.to(device, dtype=args.params_dtype)
    if not trainable:
        return model.requires_grad_(False).eval()
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer)
    return DistributedDataParallel(config, ddp, model)


def hidden_states(model: Any, inputs: ModelInputs) -> torch.Tensor:
    """Runs this stage over this context rank's part of a packed row; its output [L or L / tensor ranks, 1, E]."""
    inner, parts = unwrap(model), mpu.get_context_parallel_world_size()
    multiple = parts * (mpu.get_tensor_model_parallel_world_size() if inner.config.sequence_parallel else 1)
    pad = (0, -inputs.input_ids.shape[1] % multiple)
    part = mpu.get_context_parallel_rank()
    inner.rotary_pos_emb.positions = functional.pad(inputs.position_ids[0], pad).chunk(parts)[part]
    number = next(_numbers)
    _plans[number] = inputs.plan
    return model(
        functional.pad(inputs.input_ids, pad).chunk(parts, dim=1)[part],
        None,
        torch.tensor([number]),
        output_processor=lambda hidden_states, **kwargs: hidden_states,
    )


def forget_plans() -> None:
    """After all passes of a call."""
    _plans.clear()


def head_outputs(
    model: Any, hidden: torch.Tensor, inputs: ModelInputs, want: frozenset[str], chunk_rows: int, vocab_size: int
) -> dict[str, torch.Tensor]:
    """fp32 [P] for each of "logprobs", "logsumexp", "entropy" in `want`, from the last stage's output; the
    log-probabilities always, since they hold the graph together."""
    inner = unwrap(model)
    if inner.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    own = OwnPairs(inputs, len(hidden))
    chosen = hidden[:, 0].index_select(0, own.rows)
    if not inner.config.sequence_parallel:
        chosen = copy_to_tensor_model_parallel_region(chosen)
    shared = inner.share_embeddings_and_output_weights
    weight = inner.shared_embedding_or_output_weight() if shared else inner.output_layer.weight
    first = mpu.get_tensor_model_parallel_rank() * len(weight)
    size = max(0, min(len(weight), vocab_size - first))
    out = parallel_head(
        chosen,
        weight,
        None if own.temperature is None else own.temperature.reciprocal(),
        own.pair_rows,
        own.pair_targets,
        chunk_rows=chunk_rows,
        want_entropy="entropy" in want,
        vocab=VocabPart(first, size, mpu.get_tensor_model_parallel_group()),
    )
    result = {"logprobs": out.logprobs}
    if "logsumexp" in want:
        result["logsumexp"] = out.logsumexp[own.pair_rows]
    if "entropy" in want:
        result["entropy"] = out.entropy[own.pair_rows]
    return {name: own.everywhere(values) for name, values in result.items()}


def unwrap(model: Any) -> Any:
    return model.module if isinstance(model, DistributedDataParallel) else model


def fields_of(kind: type, args: argparse.Namespace) -> dict[str, Any]:
    """Those of Megatron's arguments that are fields of one of its config classes, as Megatron's own script takes them."""
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(kind) if hasattr(args, f.name)}
