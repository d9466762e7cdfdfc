"""The model of one role: a Hugging Face causal LM behind one `forward` that returns log-probabilities or values."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from miles_core.errors import ConfigError
from miles_fsdp_trainer import FsdpConfig, attention, check_model_folder
from miles_fsdp_trainer.head import fused_head, top_tokens
from miles_fsdp_trainer.microbatch import ModelInputs


class PackedModel(nn.Module):
    """A causal LM, with a value head beside it for the critic. The FSDP root: its own parameters (embeddings, last norm,
    heads) are whole while `forward` runs, which is why the head is applied in here."""

    def __init__(self, lm: Any, *, value_head: bool = False, logit_rows: int = 512, autocast: torch.dtype | None = None):
        super().__init__()
        self.lm = lm
        self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1, bias=True) if value_head else None
        if self.value_head is not None:
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        self.logit_rows = logit_rows
        self.autocast = autocast
        self.logit_divisor = _logit_divisor(lm)

    def plain_logprobs(self, input_ids: torch.Tensor) -> torch.Tensor:
        """fp32 [B, T - 1]: log-probabilities of tokens 1.. by the model's own forward and attention, for comparison."""
        implementation = self.lm.config._attn_implementation
        self.lm.set_attn_implementation("eager")
        try:
            return self(input_ids, plain=True)
        finally:
            self.lm.set_attn_implementation(implementation)

    def forward(self, inputs: ModelInputs | torch.Tensor, want: frozenset[str] = frozenset(), plain: bool = False) -> Any:
        """fp32 per pair [P]: "logprobs", "logsumexp", and what `want` names of "entropy" and "topk:K" (ids and
        log-probabilities, [P, K] each, under "topk_ids" and "topk_logprobs"); "values" alone for a critic."""
        if plain:
            with self._autocast(inputs.device):
                logits = self.lm(input_ids=inputs, use_cache=False).logits
            logprobs = logits[:, :-1].float().log_softmax(-1)
            return logprobs.gather(-1, inputs[:, 1:, None]).squeeze(-1)
        extra = {} if inputs.plan is None else {"miles_plan": inputs.plan}
        with self._autocast(inputs.input_ids.device):
            hidden = self.lm.base_model(
                input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, **extra
            ).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, inputs.rows)
        if self.value_head is not None:
            values = nn.functional.linear(hidden.float(), self.value_head.weight.float(), self.value_head.bias.float())
            return {"values": values.squeeze(-1).index_select(0, inputs.pair_rows)}
        return self._language_head(hidden, inputs, want)

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, self.autocast) if self.autocast else nullcontext()

    def _language_head(self, hidden: torch.Tensor, inputs: ModelInputs, want: frozenset[str]) -> dict[str, torch.Tensor]:
        weight = self.lm.get_output_embeddings().weight
        if self.autocast and hidden.is_cuda:
            hidden, weight = hidden.to(self.autocast), weight.to(self.autocast)
        elif not hidden.is_cuda:
            hidden, weight = hidden.float(), weight.float()
        temperature = inputs.temperature
        if self.logit_divisor != 1:
            ones = torch.ones(len(inputs.rows), device=hidden.device)
            temperature = (ones if temperature is None else temperature) * self.logit_divisor
        rows, targets, count = inputs.pair_rows, inputs.pair_targets, len(inputs.pair_rows)
        ks = [int(name.removeprefix("topk:")) for name in want if name.startswith("topk:")]
        k = max(ks, default=0)
        if k:
            ids = top_tokens(hidden, weight, k, self.logit_rows)[rows]
            rows, targets = torch.cat([rows, rows.repeat_interleave(k)]), torch.cat([targets, ids.flatten()])
        out = fused_head(
            hidden, weight, temperature, rows, targets, chunk_rows=self.logit_rows, want_entropy="entropy" in want
        )
        result = {"logprobs": out.logprobs[:count], "logsumexp": out.logsumexp[inputs.pair_rows]}
        if "entropy" in want:
            result["entropy"] = out.entropy[inputs.pair_rows]
        if k:
            result |= {"topk_ids": ids, "topk_logprobs": out.logprobs[count:].unflatten(0, (count, k))}
        return result


def _logit_divisor(lm: Any) -> float:
    """What the model divides its logits by besides the temperature. Raises ConfigError for heads that are not linear."""
    config = lm.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None):
        raise ConfigError("trainer fsdp: models with final logit soft-capping are not supported")
    if getattr(lm.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError("trainer fsdp: models whose language-model head has a bias are not supported")
    return float(getattr(config, "logits_scaling", 1.0)) / float(getattr(config, "logit_scale", None) or 1.0)


def load_model(path: Path, config: FsdpConfig, *, value_head: bool, single: bool) -> PackedModel:
    """The model of a folder in fp32 on the CPU, dropout off. Raises ConfigError with the folder's name."""
    check_model_folder(path)
    logging.disable_progress_bar()  # it would write over the run's own display
    attention.register()
    implementation = attention.NAME if config.packing else "sdpa"
    try:
        lm = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=implementation, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: {path} does not load as a causal language model", f"{error}") from error
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if getattr(module, "attention_dropout", None):
            module.attention_dropout = 0.0
    if config.activation_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    lm.train()
    cast = torch.bfloat16 if single and config.dtype == "bfloat16" else None
    return PackedModel(lm, value_head=value_head, logit_rows=config.logit_rows, autocast=cast)


def decoder_layers(lm: Any) -> list[nn.Module]:
    """The repeated blocks, which FSDP gathers one at a time."""
    names = set(getattr(lm, "_no_split_modules", None) or ())
    layers = [module for module in lm.modules() if type(module).__name__ in names]
    return layers or list(getattr(lm.base_model, "layers", []))


def shard(model: PackedModel, mesh: Any, config: FsdpConfig) -> None:
    """FSDP2 over all ranks of `mesh`, one unit per decoder layer and one for the rest; gradients are summed over ranks."""
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if config.dtype == "bfloat16"
        else MixedPrecisionPolicy()
    )
    for layer in decoder_layers(model.lm):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
