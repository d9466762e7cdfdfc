"""Builds one role's model for one rank: Megatron-Core's GPTModel with packed attention, its optimizer, and its weights
from a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import hf_names
import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file
from torch.nn import functional


class PackedAttention(DotProductAttention):
    """Core attention over sequences packed one after another; Megatron's local one refuses packing."""

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        bounds = kwargs["packed_seq_params"].cu_seqlens_q.tolist()
        parts = []
        for start, stop in pairwise(bounds):
            q, k, v = (t[start:stop].transpose(0, 1).unsqueeze(0) for t in (query, key, value))
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts).reshape(query.shape[0], -1)


class ValueHead(torch.nn.Linear):
    """In place of a critic's output layer; the same on every tensor-parallel rank."""

    def forward(self, hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None, **_: Any) -> Any:
        return super().forward(hidden), None


@dataclass(slots=True)
class Role:
    """A model that this rank holds a part of."""

    name: str
    model: Any
    optimizer: Any
    config: TransformerConfig
    plan: list[hf_names.Weight]
    hf_config: dict[str, Any]

    @property
    def named(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.model.module.named_parameters())

    def local(self, stage: int) -> list[hf_names.Weight]:
        return [weight for weight in self.plan if weight.stage == stage]


def load_role(name: str, folder: Path, *, lr: float, max_grad_norm: float) -> Role:
    """`folder` is a Hugging Face causal LM, or for the critic a token classifier with one label. fp32."""
    hf = json.loads((folder / "config.json").read_text("utf-8"))
    config = _config(hf)
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=hf["vocab_size"],
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=int(hf["rope_parameters"]["rope_theta"]),
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    )
    if name == "critic" and mpu.is_pipeline_last_stage():
        model.output_layer = ValueHead(hf["hidden_size"], 1)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    adam = OptimizerConfig(
        optimizer="adam", lr=lr, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-6, clip_grad=max_grad_norm
    )
    stages = mpu.get_pipeline_model_parallel_world_size()
    plan = hf_names.plan(hf, stages, "score" if name == "critic" else "lm_head")
    role = Role(name, wrapped, get_megatron_optimizer(adam, [wrapped]), config, plan, hf)
    load_weights(role, load_file(folder / "model.safetensors"))
    return role


@torch.no_grad()
def load_weights(role: Role, tensors: dict[str, torch.Tensor]) -> None:
    """Copies this rank's part of full Hugging Face tensors. Raises ValueError that lists every missing and unexpected
    name, in the folder and in the model."""
    wanted = {name: shape for weight in role.plan for name, shape in weight.hf}
    own = role.local(mpu.get_pipeline_model_parallel_rank())
    wrong = [
        f"missing {sorted(wanted.keys() - tensors.keys())}",
        f"unexpected {sorted(tensors.keys() - wanted.keys())}",
        f"without a mapping {sorted(role.named.keys() ^ {weight.name for weight in own})}",
        f"of another shape {sorted(n for n, shape in wanted.items() if n in tensors and tensors[n].shape != shape)}",
    ]
    if any(not text.endswith("[]") for text in wrong):
        raise ValueError(f"the weights of {role.name} do not fit: " + "; ".join(t for t in wrong if not t.endswith("[]")))
    tp, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    for weight in own:
        role.named[weight.name].copy_(hf_names.shard(weight, [tensors[name] for name, _ in weight.hf], tp, rank))


def _config(hf: dict[str, Any]) -> TransformerConfig:
    return TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        ffn_hidden_size=hf["intermediate_size"],
        layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=mpu.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=mpu.get_pipeline_model_parallel_world_size(),
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=True,  # no division by microbatches or data-parallel ranks: token weights did it all
        finalize_model_grads_func=lambda model, num_tokens=None, **kwargs: finalize_model_grads(model, None, **kwargs),
    )
