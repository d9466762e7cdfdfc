"""The model of one role: a Hugging Face causal LM behind one `forward` that returns log-probabilities, values or both."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from miles_core.errors import ConfigError
from miles_core.roles import divergence as parse_divergence
from miles_fsdp_trainer import FsdpConfig, attention, check_model_folder
from miles_fsdp_trainer.divergence import HeadInputs, divergence
from miles_fsdp_trainer.head import fused_head, top_tokens
from miles_fsdp_trainer.microbatch import ModelInputs

LOGPROBS = frozenset({"logprobs"})


class PackedModel(nn.Module):
    """A causal LM, a value model, or both on one trunk. The FSDP root: its own parameters (embeddings, last norm, heads)
    are whole while `forward` runs, which is why the heads are applied in here.

    A value model (`language` False) keeps the trunk alone: a language-model head that nothing reads would cost its memory.
    The value head is zero at first, so that a new critic says 0 everywhere and its first step leaves the trunk alone.
    """

    def __init__(
        self,
        lm: Any,
        *,
        language: bool = True,
        value_head: bool = False,
        logit_rows: int = 512,
        autocast: torch.dtype | None = None,
    ):
        super().__init__()
        self.logit_divisor = _logit_divisor(lm) if language else 1.0
        self.lm = lm if language else lm.base_model
        self.language = language
        self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1, bias=True) if value_head else None
        if self.value_head is not None:
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        self.logit_rows = logit_rows
        self.autocast = autocast

    @property
    def vocab_size(self) -> int:
        """Rows of the language-model head; models pad their vocabulary."""
        return self.lm.get_output_embeddings().out_features

    def plain(self, input_ids: torch.Tensor) -> torch.Tensor:
        """For comparison, by the model's own forward and attention: fp32 log-probabilities of tokens 1.. [B, T - 1], or the
        hidden states [B, T - 1, E] of a value model before them."""
        implementation = self.lm.config._attn_implementation
        self.lm.set_attn_implementation("eager")
        try:
            return self(input_ids, plain=True)
        finally:
            self.lm.set_attn_implementation(implementation)

    def forward(
        self,
        inputs: ModelInputs | torch.Tensor,
        want: frozenset[str] = LOGPROBS,
        *,
        others: Mapping[str, HeadInputs] | None = None,
        trunk_gradient: bool = True,
        plain: bool = False,
    ) -> Any:
        """What `want` names. fp32 per pair [P]: "logprobs", "logsumexp", "entropy", "values", and divergences from the
        `others` by role; "topk:K" gives "topk_ids" and "topk_logprobs", [P, K] each; "hidden" the states [P, E]; "head" the
        `HeadInputs` of this model, for another's divergence. `trunk_gradient` False trains heads alone."""
        if plain:
            return self._plain(inputs)
        extra = {} if inputs.plan is None else {"miles_plan": inputs.plan}
        with self._autocast(inputs.input_ids.device), torch.set_grad_enabled(torch.is_grad_enabled() and trunk_gradient):
            hidden = self.lm.base_model(
                input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, **extra
            ).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, inputs.rows)
        result: dict[str, Any] = {}
        if "hidden" in want:
            result["hidden"] = hidden.index_select(0, inputs.pair_rows)
        if "values" in want:
            result["values"] = self._values(hidden).index_select(0, inputs.pair_rows)
        if want - {"hidden", "values"}:
            result |= self._language(hidden, inputs, want, others or {})
        return result

    def _plain(self, input_ids: torch.Tensor) -> torch.Tensor:
        with self._autocast(input_ids.device):
            out = self.lm(input_ids=input_ids, use_cache=False)
        if not self.language:
            return out.last_hidden_state[:, :-1].float()
        logprobs = (out.logits[:, :-1].float()).log_softmax(-1)
        return logprobs.gather(-1, input_ids[:, 1:, None]).squeeze(-1)

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, self.autocast) if self.autocast else nullcontext()

    def _values(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [R]"""
        assert self.value_head is not None, "no value head here"
        values = nn.functional.linear(hidden.float(), self.value_head.weight.float(), self.value_head.bias.float())
        return values.squeeze(-1)

    def _head_inputs(self, hidden: torch.Tensor, temperature: torch.Tensor | None) -> HeadInputs:
        weight = self.lm.get_output_embeddings().weight
        if self.autocast and hidden.is_cuda:
            hidden, weight = hidden.to(self.autocast), weight.to(self.autocast)
        elif not hidden.is_cuda:
            hidden, weight = hidden.float(), weight.float()
        if self.logit_divisor != 1:
            ones = torch.ones(len(hidden), device=hidden.device)
            temperature = (ones if temperature is None else temperature) * self.logit_divisor
        return HeadInputs(hidden, weight, None if temperature is None else temperature.reciprocal())

    def _language(
        self, hidden: torch.Tensor, inputs: ModelInputs, want: frozenset[str], others: Mapping[str, HeadInputs]
    ) -> dict[str, Any]:
        head = self._head_inputs(hidden, inputs.temperature)
        if "head" in want:
            return {"head": head}
        rows, targets, count = inputs.pair_rows, inputs.pair_targets, len(inputs.pair_rows)
        k = max((int(name.removeprefix("topk:")) for name in want if name.startswith("topk:")), default=0)
        if k:
            ids = top_tokens(head.hidden, head.weight, k, self.logit_rows)[rows]
            rows, targets = torch.cat([rows, rows.repeat_interleave(k)]), torch.cat([targets, ids.flatten()])
        result: dict[str, Any] = {}
        if any(name in ("logprobs", "logsumexp", "entropy") or name.startswith("topk:") for name in want):
            out = fused_head(
                head.hidden,
                head.weight,
                head.scale,
                rows,
                targets,
                chunk_rows=self.logit_rows,
                want_entropy="entropy" in want,
            )
            result |= {"logprobs": out.logprobs[:count], "logsumexp": out.logsumexp[inputs.pair_rows]}
            if "entropy" in want:
                result["entropy"] = out.entropy[inputs.pair_rows]
            if k:
                result |= {"topk_ids": ids, "topk_logprobs": out.logprobs[count:].unflatten(0, (count, k))}
        for name in want:
            if spec := parse_divergence(name):
                result[name] = self._divergence(head, others[spec.role], spec)[inputs.pair_rows]
        return result

    def _divergence(self, head: HeadInputs, other: HeadInputs, spec: Any) -> torch.Tensor:
        """fp32 [R]. Vocabularies that are padded differently are compared over the ids that both have."""
        size = min(len(head.weight), len(other.weight))
        return divergence(
            head.first_ids(size),
            other.first_ids(size),
            reverse=spec.kind == "reverse_kl",
            k=spec.k,
            chunk_rows=self.logit_rows,
        )


def _logit_divisor(lm: Any) -> float:
    """What the model divides its logits by besides the temperature. Raises ConfigError for heads that are not linear."""
    config = lm.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None):
        raise ConfigError("trainer fsdp: models with final logit soft-capping are not supported")
    if getattr(lm.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError("trainer fsdp: models whose language-model head has a bias are not supported")
    return float(getattr(config, "logits_scaling", 1.0)) / float(getattr(config, "logit_scale", None) or 1.0)


def load_model(
    path: Path,
    config: FsdpConfig,
    *,
    single: bool,
    language: bool = True,
    value_head: bool = False,
    where: str = "model.path",
) -> PackedModel:
    """The model of a folder in fp32 on the CPU, dropout off. Raises ConfigError with `where` and the folder's name."""
    check_model_folder(path, where)
    logging.disable_progress_bar()  # it would write over the run's own display
    attention.register()
    implementation = attention.NAME if config.packing else "sdpa"
    try:
        lm = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=implementation, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{where}: {path} does not load as a causal language model", f"{error}") from error
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if getattr(module, "attention_dropout", None):
            module.attention_dropout = 0.0
    if config.activation_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    lm.train()
    cast = torch.bfloat16 if single and config.dtype == "bfloat16" else None
    return PackedModel(lm, language=language, value_head=value_head, logit_rows=config.logit_rows, autocast=cast)


def decoder_layers(lm: Any) -> list[nn.Module]:
    """The repeated blocks, which FSDP gathers one at a time."""
    names = set(getattr(lm, "_no_split_modules", None) or ())
    layers = [module for module in lm.modules() if type(module).__name__ in names]
    return layers or list(getattr(lm.base_model, "layers", []))


def shard(model: PackedModel, mesh: Any, config: FsdpConfig) -> None:
    """FSDP2 over all ranks of `mesh`, one unit per decoder layer and one for the rest; gradients are summed over ranks."""
    low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if config.dtype == "bfloat16" else {}
    policy = MixedPrecisionPolicy(**low)
    for layer in decoder_layers(model.lm):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # The root's inputs hold temperatures and another model's head, which bf16 would round.
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**low, cast_forward_inputs=False))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
