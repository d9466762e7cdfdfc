"""A lean forward pass for Llama-shaped models, built on the model's own parameters.

It does less per step than the model's own: one matrix product for q, k and v and one for gate and up, no padding in
prompts, no dispatch through modules, the head only where a token is sampled, long prompts attended to in place.

Legend: T packed tokens, N rows, Q query heads, H key-value heads, G = Q / H, D head size, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from miles_torch_rollout.kv import Prefix, Rows, StepPlan
from miles_torch_rollout.prompts import Prompt

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [T, Q, D], k [T, H, D], v [T, H, D]) -> [T, Q * D]"""

FAMILIES = frozenset({"llama", "qwen2", "qwen3"})
ROPE_TYPES = frozenset({"default", "linear", "llama3"})
"""Rotary embeddings whose frequencies do not depend on the length of the sequence."""


def unsupported(model: Any) -> str:
    """Why the fused pass does not serve this model, or ""."""
    config = model.config
    if config.model_type not in FAMILIES:
        return f"the architecture {config.model_type} has none"
    if config.hidden_act != "silu":
        return f"the activation is {config.hidden_act}"
    if getattr(config, "use_sliding_window", False) or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        return "some layers attend to a window"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        return f"the rotary embedding is {rope}"
    return ""


class FusedModel:
    """`prefill`, `decode` and `hidden` + `head` of a Llama, Qwen2 or Qwen3 model. Construction moves the weights of q, k, v
    and of gate, up next to each other; the model's parameters become views of them, so that they stay one copy."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self.base = model.model
        self.embedding, self.lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        self.rotary, self.norm = self.base.rotary_emb, self.base.norm
        self.num_q, self.num_kv = config.num_attention_heads, config.num_key_value_heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps, self.scale = config.rms_norm_eps, self.head_size**-0.5
        self.layers = [_Layer(layer) for layer in self.base.layers]
        self.share_prompts = self.embedding.weight.device.type == "cpu"
        """Whether rows attend to long prompts in place, with attention in plain products; on CUDA the loop over prompts
        would cost more in kernel launches than it saves, and the library's attention serves copied prompts."""

    def prefill(self, prompts: Sequence[Prompt]) -> list[Prefix]:
        """The prompts' keys and values, and the logits of what follows each. Only what comes after a prompt's known
        beginning is computed; every rest attends to its beginning."""
        lengths = [len(p.ids) - p.depth for p in prompts]
        made = [self._room(len(p.ids)) for p in prompts]
        begins = [p.kept or before for p, before in zip(prompts, [None, *made], strict=False)]
        masks = [_causal_rest(p) for p in prompts]

        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            outs = []
            parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
            for (q_own, k_own, v_own), prompt, prefix, begin, mask in zip(parts, prompts, made, begins, masks, strict=True):
                depth = prompt.depth
                if depth:
                    prefix.k[index, :, :depth] = begin.k[index, :, :depth]
                    prefix.v[index, :, :depth] = begin.v[index, :, :depth]
                prefix.k[index, :, depth:] = k_own.transpose(0, 1)
                prefix.v[index, :, depth:] = v_own.transpose(0, 1)
                outs.append(self._attend_causal(q_own.transpose(0, 1), prefix.k[index], prefix.v[index], mask))
            return torch.cat(outs)

        positions = torch.cat([torch.arange(p.depth, len(p.ids), device=p.ids.device) for p in prompts])
        hidden = self._packed(torch.cat([p.ids[p.depth :] for p in prompts]), positions, attend)
        ends = torch.tensor(lengths, device=hidden.device).cumsum(0) - 1
        for prefix, logits in zip(made, self.head(hidden[ends]), strict=True):
            prefix.logits = logits.clone()
        return made

    def hidden(self, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[len, E] of each sequence, after the last norm."""
        lengths = [len(s) for s in sequences]

        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            parts = zip(*(t.transpose(0, 1).split(lengths, 1) for t in (q, k, v)), strict=True)
            return torch.cat([self._attend_causal(*part) for part in parts])

        positions = torch.cat([torch.arange(n, device=sequences[0].device) for n in lengths])
        return list(self._packed(torch.cat(list(sequences)), positions, attend).split(lengths))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[..., V] logits."""
        return F.linear(hidden, self.lm_head.weight, self.lm_head.bias).float()

    def decode(self, tokens: torch.Tensor, rows: Rows, plan: StepPlan) -> torch.Tensor:
        """float32[N, V]: the logits after one more token int64[N] in every row."""
        x = F.embedding(tokens, self.embedding.weight)
        cos, sin = self._rope(x, plan.positions)
        for index, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, F.rms_norm(x, layer.shape, layer.norm1, self.eps), cos, sin)
            rows.k[index][plan.rows, :, plan.slots] = k
            rows.v[index][plan.rows, :, plan.slots] = v
            x = self._rest(layer, x, self._attend_rows(q, rows, plan, index))
        rows.advance()
        return self.head(F.rms_norm(x, self.layers[0].shape, self.norm.weight, self.eps))

    def _packed(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[T, E] of tokens of several sequences, one after the other without padding."""
        x = F.embedding(tokens, self.embedding.weight)
        cos, sin = self._rope(x, positions)
        for index, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, F.rms_norm(x, layer.shape, layer.norm1, self.eps), cos, sin)
            x = self._rest(layer, x, attend(index, q, k, v))
        return F.rms_norm(x, self.layers[0].shape, self.norm.weight, self.eps)

    def _room(self, num_tokens: int) -> Prefix:
        """A prompt whose keys, values and logits are yet to come."""
        weight = self.layers[0].qkv
        shape = (len(self.layers), self.num_kv, num_tokens, self.head_size)
        return Prefix(weight.new_empty(shape), weight.new_empty(shape), weight.new_empty(0))

    def _rope(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rotary(x, positions[None])
        half = self.head_size // 2
        sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)  # the sign of rotate_half, once instead of per layer
        return cos[0, :, None], sin[:, None]

    def _qkv(self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q [T, Q, D] and k [T, H, D], rotated, and v [T, H, D]."""
        heads = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, self.head_size)
        qk, v = heads[:, : self.num_q + self.num_kv], heads[:, self.num_q + self.num_kv :]
        if layer.q_norm is not None:
            q = F.rms_norm(qk[:, : self.num_q], (self.head_size,), layer.q_norm, self.eps)
            k = F.rms_norm(qk[:, self.num_q :], (self.head_size,), layer.k_norm, self.eps)
            qk = torch.cat([q, k], dim=1)
        half = self.head_size // 2
        swapped = torch.cat([qk[..., half:], qk[..., :half]], dim=-1)
        qk = torch.addcmul(qk * cos, swapped, sin)
        return qk[:, : self.num_q], qk[:, self.num_q :], v

    def _rest(self, layer: _Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What follows attention: output projection and MLP, each added to the residual stream."""
        x = x + F.linear(attended, layer.o, layer.o_bias)
        both = F.linear(F.rms_norm(x, layer.shape, layer.norm2, self.eps), layer.gate_up, layer.gate_up_bias)
        gate, up = both.chunk(2, dim=-1)
        return x + F.linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)

    def _attend_causal(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[n, Q * D] for the last n of P tokens: q [Q, n, D] over k, v [H, P, D]. Without a mask n is P, or 1."""
        out = F.scaled_dot_product_attention(
            q[None],
            k[None],
            v[None],
            attn_mask=mask,
            is_causal=mask is None and q.shape[1] == k.shape[1],
            scale=self.scale,
            enable_gqa=self.num_q > self.num_kv,
        )
        return out[0].transpose(0, 1).flatten(1)

    def _attend_rows(self, q: torch.Tensor, rows: Rows, plan: StepPlan, index: int) -> torch.Tensor:
        """[N, Q * D] for q [N, Q, D] over each row's own slots and, where it has one, its shared prompt."""
        count = len(q)
        k, v = rows.k[index, :count, :, : plan.num_slots], rows.v[index, :count, :, : plan.num_slots]
        if not self.share_prompts:
            out = F.scaled_dot_product_attention(
                q[:, :, None], k, v, attn_mask=plan.mask, scale=self.scale, enable_gqa=self.num_q > self.num_kv
            )
            return out.flatten(1)
        grouped = q.reshape(count, self.num_kv, -1, self.head_size)  # [N, H, G, D]
        scores = torch.matmul(grouped, k.transpose(-1, -2)).mul_(self.scale)
        if plan.mask is not None:
            scores.add_(plan.mask)
        out = torch.matmul(torch.softmax(scores, dim=-1), v)
        if plan.groups:
            own_mass = torch.logsumexp(scores.index_select(0, plan.order), dim=-1, keepdim=True)
            out.index_copy_(0, plan.order, self._with_prompts(grouped, out, own_mass, plan, index))
        return out.flatten(1)

    def _with_prompts(
        self, grouped: torch.Tensor, own: torch.Tensor, own_mass: torch.Tensor, plan: StepPlan, index: int
    ) -> torch.Tensor:
        """[M, H, G, D]: attention over shared prompt and own slots, merged by their softmax masses (log-sum-exp)."""
        _, heads, per_head, size = grouped.shape
        start, outs, masses = 0, [], []
        queries = grouped.index_select(0, plan.order)
        for prefix, count in plan.groups:
            q = queries[start : start + count].transpose(0, 1).reshape(heads, count * per_head, size)
            scores = torch.bmm(q, prefix.k[index].transpose(-1, -2)).mul_(self.scale)
            masses.append(torch.logsumexp(scores, dim=-1).view(heads, count, per_head).transpose(0, 1))
            out = torch.bmm(torch.softmax(scores, dim=-1), prefix.v[index])
            outs.append(out.view(heads, count, per_head, size).transpose(0, 1))
            start += count
        prompt_mass = torch.cat(masses)[..., None]
        share = torch.sigmoid(prompt_mass - own_mass)  # exp(a) / (exp(a) + exp(b))
        return torch.lerp(own.index_select(0, plan.order), torch.cat(outs), share)


class _Layer:
    """Views of one decoder layer's parameters; q, k, v and gate, up are made neighbours first."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv, self.qkv_bias = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up, self.gate_up_bias = _fuse(mlp.gate_proj, mlp.up_proj)
        self.o, self.o_bias = attention.o_proj.weight, attention.o_proj.bias
        self.down, self.down_bias = mlp.down_proj.weight, mlp.down_proj.bias
        self.norm1, self.norm2 = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.q_norm = attention.q_norm.weight if hasattr(attention, "q_norm") else None
        self.k_norm = attention.k_norm.weight if hasattr(attention, "k_norm") else None
        self.shape = tuple(self.norm1.shape)


def _causal_rest(prompt: Prompt) -> torch.Tensor | None:
    """bool[n, P], true where one of the n tokens after the known beginning may look; None where a flag or nothing does."""
    size = len(prompt.ids)
    if not prompt.depth or prompt.depth == size - 1:
        return None
    places = torch.arange(size, device=prompt.ids.device)
    return places[None] <= places[prompt.depth :, None]


def _fuse(*linears: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight (and bias) for several projections of the same input; theirs become views of it."""
    weight = torch.cat([linear.weight.data for linear in linears])
    bias = torch.cat([linear.bias.data for linear in linears]) if linears[0].bias is not None else None
    sizes = [linear.weight.shape[0] for linear in linears]
    for linear, part in zip(linears, weight.split(sizes), strict=True):
        linear.weight.data = part
    if bias is not None:
        for linear, part in zip(linears, bias.split(sizes), strict=True):
            linear.bias.data = part
    return weight, bias
